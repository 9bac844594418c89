#!/usr/bin/env python3
"""Packs a release from a built module: image layout, bill of materials, licences, dashboard, alerts, checksums.

    scripts/dist.py pack --wasm dist/idempotency.wasm --out dist [--schema FILE] [--runbooks https://…/runbooks]
    scripts/dist.py licence 'MIT OR Apache-2.0'      exit status 0 if the release may carry it

Needs Python 3.9 and cargo, nothing else. The same inputs give the same bytes: no time, user or path goes in.
"""

import argparse
import gzip
import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = "wasm32-wasip1"

# What the module may be made of: licences that ask for no more than their text, or are the project's own.
ALLOWED = {
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def to_json(value):
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# --- licences -------------------------------------------------------------------------------------------------------


def spdx(expression):
    """An SPDX expression as cargo gives it: `/` is how OR was once written."""
    return re.sub(r"\s*/\s*", " OR ", expression.strip())


def is_allowed(expression):
    """Whether one choice that the expression offers is made of allowed licences only. AND binds stronger than OR."""
    tokens = re.findall(r"[()]|[^\s()]+", spdx(expression))
    at = 0

    def peek():
        return tokens[at] if at < len(tokens) else None

    def take():
        nonlocal at
        at += 1
        return tokens[at - 1]

    def chain(word, part):
        results = [part()]
        while peek() == word:
            take()
            results.append(part())
        return results

    def one():
        if peek() == "(":
            take()
            inner = any_of()
            if peek() != ")":
                raise ValueError(f"a parenthesis is left open in {expression!r}")
            take()
            return inner
        if peek() in (None, ")", "AND", "OR", "WITH"):
            raise ValueError(f"a licence is missing in {expression!r}")
        name = take()
        if peek() == "WITH":
            take()
            if peek() is None:
                raise ValueError(f"an exception is missing in {expression!r}")
            name = f"{name} WITH {take()}"
        return name in ALLOWED

    def all_of():
        return all(chain("AND", one))

    def any_of():
        return any(chain("OR", all_of))

    allowed = any_of()
    if peek() is not None:
        raise ValueError(f"{peek()!r} is out of place in {expression!r}")
    return allowed


def licence_files(package):
    """The texts that a crate ships, by name."""
    folder = pathlib.Path(package["manifest_path"]).parent
    wanted = re.compile(r"(LICEN[CS]E|COPYING|UNLICENSE|NOTICE)", re.IGNORECASE)
    return [path for path in sorted(folder.iterdir()) if wanted.match(path.name) and path.is_file()]


# --- dependencies ---------------------------------------------------------------------------------------------------


class Dependencies:
    """The crates that the module is built from, out of Cargo.lock, for the module's target."""

    def __init__(self):
        command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET]
        metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        self.packages = {package["id"]: package for package in metadata["packages"]}
        self.nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
        self.root = metadata["resolve"]["root"]
        self.checksums = self._checksums()
        # Procedural macros and build scripts run in the compiler; they and what only they use are not in the module.
        self.linked = self._reach(lambda package, kind: kind is None and not self._is_macro(package))
        self.all = self._reach(lambda package, kind: kind in (None, "build"))

    @staticmethod
    def _is_macro(package):
        return any("proc-macro" in target["kind"] for target in package["targets"])

    @staticmethod
    def _checksums():
        found = {}
        name = version = None
        for line in (ROOT / "Cargo.lock").read_text().splitlines():
            field = re.fullmatch(r'(name|version|checksum) = "(.*)"', line)
            if field and field[1] == "name":
                name = field[2]
            elif field and field[1] == "version":
                version = field[2]
            elif field:
                found[name, version] = field[2]
        return found

    def edges(self, package, follows):
        for dependency in self.nodes[package]["deps"]:
            target = self.packages[dependency["pkg"]]
            if any(follows(target, kind["kind"]) for kind in dependency["dep_kinds"]):
                yield dependency["pkg"]

    def _reach(self, follows):
        seen, todo = set(), [self.root]
        while todo:
            package = todo.pop()
            if package not in seen:
                seen.add(package)
                todo.extend(self.edges(package, follows))
        return seen

    def sorted(self, ids):
        """Without the project itself."""
        packages = [self.packages[each] for each in ids if each != self.root]
        return sorted(packages, key=lambda package: (package["name"], package["version"]))

    @property
    def project(self):
        return self.packages[self.root]


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def bill_of_materials(dependencies, wasm):
    """CycloneDX 1.5. What the compiler alone runs has the scope `excluded`."""
    project = dependencies.project

    def component(package):
        described = {
            "type": "library",
            "bom-ref": purl(package),
            "name": package["name"],
            "version": package["version"],
            "scope": "required" if package["id"] in dependencies.linked else "excluded",
            "licenses": [{"expression": spdx(package["license"])}],
            "purl": purl(package),
        }
        checksum = dependencies.checksums.get((package["name"], package["version"]))
        if checksum:
            described["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        if package.get("repository"):
            described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
        return described

    packages = dependencies.sorted(dependencies.all)
    edges = [
        {
            "ref": purl(package),
            "dependsOn": sorted(
                purl(dependencies.packages[each])
                for each in dependencies.edges(package["id"], lambda _, kind: kind in (None, "build"))
            ),
        }
        for package in [project, *packages]
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # Of the module's digest, so that the same module has the same number.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, sha256(wasm))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": purl(project),
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"expression": spdx(project["license"])}],
                "hashes": [{"alg": "SHA-256", "content": sha256(wasm)}],
                "purl": purl(project),
            }
        },
        "components": [component(package) for package in packages],
        "dependencies": edges,
    }


def third_party_licences(dependencies):
    """Every text of every crate in the module, each text once."""
    texts = {}
    listed = []
    for package in dependencies.sorted(dependencies.linked):
        named = f"{package['name']} {package['version']}"
        expression = package["license"]
        if not expression or not is_allowed(expression):
            sys.exit(f"dist: {named} is under {expression!r}: not among {sorted(ALLOWED)}")
        files = licence_files(package)
        if not files:
            sys.exit(f"dist: {named} ships no licence text")
        listed.append(f"{named}: {spdx(expression)}")
        for path in files:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n").strip()
            texts.setdefault(text, []).append(f"{named} ({path.name})")
    for package in dependencies.sorted(dependencies.all - dependencies.linked):
        if not package["license"] or not is_allowed(package["license"]):
            sys.exit(f"dist: {package['name']} is under {package['license']!r}: not among {sorted(ALLOWED)}")
    bar = "=" * 100
    parts = [
        "The crates that idempotency.wasm is made of, with their licences and the texts that they ship.\n\n"
        + "\n".join(listed)
        + "\n\nRust's standard library for wasm32-wasip1, with wasi-libc, is linked in as well: MIT OR Apache-2.0, with\n"
        "the notices in COPYRIGHT-library.html of the Rust distribution.\n"
    ]
    for text, users in texts.items():
        parts.append(f"{bar}\n" + "\n".join(users) + f"\n{bar}\n\n{text}\n")
    return "\n".join(parts).encode()


# --- the image ------------------------------------------------------------------------------------------------------


def layer_of(wasm):
    """A tar with the one file `plugin.wasm`, owned by root, at time 0."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        entry = tarfile.TarInfo("plugin.wasm")
        entry.size = len(wasm)
        entry.mode = 0o644
        tar.addfile(entry, io.BytesIO(wasm))
    return buffer.getvalue()


def gzipped(data):
    buffer = io.BytesIO()
    # No name and no time in the header.
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as stream:
        stream.write(data)
    return buffer.getvalue()


def write_image(folder, wasm, project):
    """An OCI image layout of the "compat" kind that Istio and Envoy Gateway load; returns the manifest's digest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(media_type, data):
        (blobs / sha256(data)).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{sha256(data)}", "size": len(data)}

    tar = layer_of(wasm)
    labels = {
        "org.opencontainers.image.title": project["name"],
        "org.opencontainers.image.description": project["description"],
        "org.opencontainers.image.version": project["version"],
        "org.opencontainers.image.licenses": project["license"],
    }
    epoch = "1970-01-01T00:00:00Z"
    config = {
        "created": epoch,
        # A module runs on any machine, but tools that pull images ask for one: these are what `docker build` would say.
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(tar)}"]},
        "history": [{"created": epoch, "created_by": "scripts/dist.py"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("application/vnd.oci.image.config.v1+json", to_json(config)),
        "layers": [blob("application/vnd.oci.image.layer.v1.tar+gzip", gzipped(tar))],
        # The specification of the kind asks for the annotation where the layer has OCI's media type.
        "annotations": {"module.wasm.image/variant": "compat", **labels},
    }
    described = blob(manifest["mediaType"], to_json(manifest))
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {**described, "annotations": {"org.opencontainers.image.ref.name": project["version"]}},
        ],
    }
    (folder / "index.json").write_bytes(to_json(index))
    (folder / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}\n')
    return described["digest"]


# --- the rest -------------------------------------------------------------------------------------------------------


def release_notes(version):
    """The version's part of CHANGELOG.md, or what is not released yet."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titled = {section.split("\n", 1)[0].strip(): section for section in sections}
    for title in titled:
        if re.match(rf"\[?{re.escape(version)}\]?(\s|$)", title):
            return ("## " + titled[title]).rstrip().encode() + b"\n"
    if "Unreleased" in titled:
        return ("## " + titled["Unreleased"]).rstrip().encode() + b"\n"
    sys.exit(f"dist: CHANGELOG.md has neither {version} nor Unreleased")


def alerts(runbooks):
    text = (ROOT / "observability" / "alerts.yaml").read_text(encoding="utf-8")
    if runbooks:
        text = text.replace("runbook_url: docs/runbooks/", f"runbook_url: {runbooks.rstrip('/')}/")
    return text.encode()


def pack(options):
    wasm = options.wasm.read_bytes()
    if not wasm.startswith(b"\0asm"):
        sys.exit(f"dist: {options.wasm} is not a WebAssembly module")
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    dependencies = Dependencies()
    project = dependencies.project
    files = {
        "idempotency.wasm": wasm,
        "idempotency.wasm.sha256": f"{sha256(wasm)}  idempotency.wasm\n".encode(),
        "sbom.cdx.json": to_json(bill_of_materials(dependencies, wasm)),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "THIRD-PARTY-LICENSES.txt": third_party_licences(dependencies),
        "RELEASE-NOTES.md": release_notes(project["version"]),
        "observability/alerts.yaml": alerts(options.runbooks),
        "observability/access-log.yaml": (ROOT / "observability" / "access-log.yaml").read_bytes(),
        "observability/dashboard.json": (ROOT / "observability" / "dashboard.json").read_bytes(),
    }
    if options.schema:
        schema = options.schema.read_bytes()
        json.loads(schema)
        files["idempotency.schema.json"] = schema
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # What is used while it is packed (the module) is not touched where it is right.
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
    image = out / "image"
    if image.exists():
        shutil.rmtree(image)
    digest = write_image(image, wasm, project)
    packed = [*files, *(str(path.relative_to(out)) for path in image.rglob("*") if path.is_file())]
    sums = "".join(f"{sha256((out / name).read_bytes())}  {name}\n" for name in sorted(packed))
    (out / "SHA256SUMS").write_text(sums)
    print(f"{project['name']} {project['version']}")
    print(f"module  sha256:{sha256(wasm)}")
    print(f"image   {digest}")
    print(f"{len(packed)} files, listed in {out / 'SHA256SUMS'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--wasm", type=pathlib.Path, required=True)
    packing.add_argument("--out", type=pathlib.Path, required=True)
    packing.add_argument("--schema", type=pathlib.Path, help="the JSON schema of the plugin configuration")
    packing.add_argument("--runbooks", help="the address under which docs/runbooks/ is published")
    commands.add_parser("licence").add_argument("expression")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options)
    elif not is_allowed(options.expression):
        sys.exit(f"dist: {options.expression!r} is not allowed")


if __name__ == "__main__":
    main()
