"""Sends intents, all at once, with the Python code of docs/clients.md, and prints what came of each."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from intent import Rejected, Unsettled, send


def outcome(intent):
    try:
        status, headers, content = send(
            intent["url"],
            intent["key"],
            intent["body"].encode(),
            intent["headers"],
            patience=intent["patience_ms"] / 1000,
            timeout=intent["timeout_ms"] / 1000,
            resent=intent["resent"],
        )
    except Rejected as why:
        return {"rejected": str(why)}
    except Unsettled as why:
        return {"unsettled": str(why)}
    replayed = headers.get("idempotent-replayed") == "true"
    return {"answer": status, "content": content.decode(), "replayed": replayed}


with ThreadPoolExecutor(max_workers=64) as pool:
    print(json.dumps(list(pool.map(outcome, json.loads(sys.argv[1])))))
