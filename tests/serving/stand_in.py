"""A stand-in for the server behind the page of `sympow serve`: a script decides what it answers."""

import json
import threading
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

TYPES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
STATE_BYTES = 1_234_567
# Entries of `StandIn.tokens` that are no text.
WAIT, BREAK_OFF = object(), object()


class StandIn:
    """Serves the page and answers its requests until `close`.

    Attributes:
        files: of the page, by name.
        key: the API key that requests must have; None: none.
        state_bytes: of a state of the model; None: it grows with the text.
        contexts: by id, as `GET /v1/contexts/{id}` gives them.
        texts: the uploaded texts, by context id.
        tokens: what a completion consists of: texts, whole events, WAIT (until `go_on` is set) and BREAK_OFF.
        finish: the reason why a completion ends.
        refusals: answers to the next POST requests: (path, status, headers, error message).
        requests: (method, path, headers, body) of every request that is not for a file.
        send_lists: cleared while lists of contexts wait before they are sent.
        cut_off: set when a client has gone away during a completion.
    """

    def __init__(self):
        self.files = {name: files("sympow.serving.web").joinpath("page", name).read_bytes() for name in TYPES}
        self.key = None
        self.state_bytes = STATE_BYTES
        self.contexts = {}
        self.texts = {}
        self.tokens = ["Once", " upon", " a", " time"]
        self.finish = "stop"
        self.refusals = []
        self.requests = []
        self.go_on = threading.Event()
        self.cut_off = threading.Event()
        self.send_lists = threading.Event()
        self.send_lists.set()
        outer = self

        class Handler(_Handler):
            stand_in = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self):
        self.go_on.set()
        self.send_lists.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name, tokens=1000, **changes):
        """Adds a document that is read, unless changes say otherwise."""
        number = len(self.texts) + 1
        context = {
            "id": f"ctx-{number}",
            "object": "context",
            "name": name,
            "status": "ready",
            "tokens": tokens,
            "tokens_read": tokens,
            "nbytes": STATE_BYTES,
            "created_at": 1_700_000_000 + number,
            "in_memory": True,
            "parent": None,
            "error": None,
        }
        self.contexts[context["id"]] = context | changes
        self.texts.setdefault(context["id"], "")
        return self.contexts[context["id"]]

    def bodies(self, path):
        """Bodies of the requests to a path, in order."""
        return [body for _, asked, _, body in self.requests if asked == path]


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def log_message(self, *_):
        pass

    def reply(self, status, body, kind="application/json", headers=()):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        # As strict as the server's own.
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message, headers=()):
        self.reply(status, {"error": {"message": message, "type": "error", "code": None}}, headers=headers)

    def do_GET(self):
        name = "index.html" if self.path == "/" else self.path[1:]
        if name in TYPES:
            self.reply(200, self.stand_in.files[name], f"{TYPES[name]}; charset=utf-8")
        else:
            self.answer()

    def do_POST(self):
        self.answer()

    def do_DELETE(self):
        self.answer()

    def answer(self):
        server = self.stand_in
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get("Content-Type", "")
        body = json.loads(raw) if kind == "application/json" else form_of(kind, raw) if raw else None
        server.requests.append((self.command, self.path, dict(self.headers), body))
        if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.refuse(401, "a key is needed")
        for refusal in server.refusals:
            path, status, headers, message = refusal
            # Not the lists of contexts that the page asks for by itself.
            if (self.command, self.path) == ("POST", path):
                server.refusals.remove(refusal)
                return self.refuse(status, message, headers)
        match self.command, self.path.strip("/").split("/"):
            case "GET", ["v1", "models"]:
                model = {"id": "tiny", "object": "model", "state_bytes": server.state_bytes}
                return self.reply(200, {"object": "list", "data": [model]})
            case "GET", ["v1", "contexts"]:
                found = list(reversed(server.contexts.values()))
                server.send_lists.wait()
                return self.reply(200, {"object": "list", "data": found})
            case "POST", ["v1", "contexts"]:
                context = server.add(body["name"], tokens=4000, status="reading", tokens_read=0, nbytes=None)
                server.texts[context["id"]] = body.get("text", body.get("file"))
                return self.reply(202, context)
            case "GET", ["v1", "contexts", id] if id in server.contexts:
                return self.reply(200, server.contexts[id])
            case "DELETE", ["v1", "contexts", id] if id in server.contexts:
                del server.contexts[id]
                return self.reply(200, {"id": id, "deleted": True})
            case "POST", ["v1", "completions"] if body.get("context") is None or body["context"] in server.contexts:
                return self.stream()
        return self.refuse(404, f"there is nothing at {self.path}")

    def stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        server = self.stand_in
        try:
            for token in server.tokens:
                if token is WAIT:
                    # A comment now and then, by which a connection that was cut off is found.
                    while not server.go_on.wait(0.02):
                        self.wfile.write(b": still here\n\n")
                elif isinstance(token, dict):
                    self.event(token)
                elif token is BREAK_OFF:
                    return
                else:
                    self.event({"choices": [{"index": 0, "text": token, "finish_reason": None}]})
            self.event({"choices": [{"index": 0, "text": "", "finish_reason": server.finish}]})
            self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}})
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            server.cut_off.set()

    def event(self, content):
        self.wfile.write(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n")


def form_of(kind, raw):
    """The fields of a multipart form."""
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + raw)
    return {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True).decode()
        for part in message.iter_parts()
    }
