"""The demo service of compose.yaml: every POST is a payment, and /count tells how many there were."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import environ
from threading import Lock

lock = Lock()
payments = 0


class Payments(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        global payments
        self.rfile.read(int(self.headers.get("content-length", 0)))
        with lock:
            payments += 1
            number = payments
        self.answer(201, {"id": f"pay-{number}"})

    def do_GET(self):
        self.answer(200, {"payments": payments})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer((environ.get("ADDRESS", "0.0.0.0"), int(environ.get("PORT", "8080"))), Payments).serve_forever()
