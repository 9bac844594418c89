#!/usr/bin/env python3
"""Checks a bill of materials against the JSON schema of CycloneDX 1.5.

    PYTHONPATH=$(scripts/install-cyclonedx.sh) scripts/check-sbom.py dist/sbom.cdx.json
"""

import importlib.util
import json
import pathlib
import sys

import jsonschema
import referencing

# Found without importing the package, whose dependencies are not there.
package = pathlib.Path(importlib.util.find_spec("cyclonedx").submodule_search_locations[0])
schemas = package / "schema" / "_res"


def load(name):
    return json.loads((schemas / f"{name}.SNAPSHOT.schema.json").read_text(encoding="utf-8"))


registry = referencing.Registry().with_resources(
    (schema["$id"], referencing.Resource.from_contents(schema)) for schema in map(load, ["bom-1.5", "spdx", "jsf-0.82"])
)
validator = jsonschema.Draft7Validator(load("bom-1.5"), registry=registry)
errors = list(validator.iter_errors(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))))
for error in errors:
    print(f"{error.json_path}: {error.message}", file=sys.stderr)
sys.exit(1 if errors else 0)
