"""A hub on loopback that speaks what the real huggingface_hub client sends, git left out.

Repositories are lists of commits, each a whole tree. Files up to 1 kB are regular, larger ones go
through the LFS batch protocol. A commit whose parent is not the newest one is refused, as there.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM = 1000


class Hub:
    """The state of the server, for tests to look at and to change.

    Attributes:
        repos: Name to commits, the oldest first: id and tree.
        requests: Method and path of everything that was asked for.
        before_commit: Called before a commit is accepted; tests let others be faster there.
    """

    def __init__(self):
        self.repos = {}
        self.blobs = {}
        self.requests = []
        self.lock = threading.Lock()
        self.before_commit = None
        self.refuse = None
        hub = self

        class Handler(_Handler):
            state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def tree(self, repo, revision="main"):
        """Return commit and files at a revision."""
        commits = self.repos[repo]
        if revision in ("main", None):
            return commits[-1]
        return next(commit for commit in commits if commit[0] == revision)

    def commit(self, repo, changes, deleted=()):
        """Make a commit without the client; changes map paths to bytes."""
        files = dict(self.repos[repo][-1][1]) if self.repos.get(repo) else {}
        for path in deleted:
            files = {p: d for p, d in files.items() if p != path and not p.startswith(path + "/")}
        files |= changes
        head = json.dumps([len(self.repos.get(repo, [])), repo, sorted(files)])
        sha = hashlib.sha1(head.encode()).hexdigest()
        self.repos.setdefault(repo, []).append((sha, files))
        return sha


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer("GET")

    def do_HEAD(self):
        self.answer("HEAD")

    def do_POST(self):
        self.answer("POST")

    def do_PUT(self):
        self.answer("PUT")

    def answer(self, method):
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub = self.state
        with hub.lock:
            hub.requests.append((method, path))
            if hub.refuse is not None and hub.refuse(method, path):
                self.reply(500, {"error": "a bad day"})
                return
            for wanted, pattern, call in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method in wanted:
                    call(self, *match.groups(), **parse_qs(url.query))
                    return
        self.reply(404, {"error": f"no route {method} {path}"})

    def reply(self, code, content=None, headers=()):
        data = b"" if content is None else content
        if not isinstance(data, bytes):
            data = json.dumps(data).encode()
        self.send_response(code)
        for key, value in dict(headers).items():
            self.send_header(key, str(value))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def found(self, repo, revision="main"):
        """Return a commit, or answer that there is none."""
        if repo not in self.state.repos:
            # The real hub does not tell apart what is missing and what is private.
            self.reply(401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
            return None
        try:
            return self.state.tree(repo, revision)
        except StopIteration:
            self.reply(404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
            return None

    def info(self, repo, revision="main", **_):
        if (commit := self.found(repo, revision)) is not None:
            files = [{"rfilename": path} for path in commit[1]]
            self.reply(200, {"id": repo, "modelId": repo, "sha": commit[0], "siblings": files,
                             "private": False, "tags": []})  # fmt: skip

    def list_tree(self, repo, revision, folder=None, recursive=("false",), **_):
        if (commit := self.found(repo, revision)) is None:
            return
        stem = f"{folder}/" if folder else ""
        items = {}
        for path, data in commit[1].items():
            if not path.startswith(stem):
                continue
            rest = path.removeprefix(stem)
            if "/" in rest and recursive[0].lower() not in ("true", "1"):
                name = stem + rest.split("/")[0]
                items[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            else:
                items[path] = {"type": "file", "path": path, "oid": _oid(data), "size": len(data)}
        if folder and not items:
            self.reply(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
            return
        self.reply(200, list(items.values()))

    def resolve(self, repo, revision, path):
        if (commit := self.found(repo, revision)) is None:
            return
        headers = {"X-Repo-Commit": commit[0]}
        if path not in commit[1]:
            self.reply(404, b"no", {**headers, "X-Error-Code": "EntryNotFound"})
            return
        data = commit[1][path]
        large = len(data) > LFS_FROM
        tag = hashlib.sha256(data).hexdigest() if large else _oid(data)
        self.reply(200, data, {**headers, "ETag": f'"{tag}"'})

    def create(self):
        given = json.loads(self.body)
        name = f"{given.get('organization') or 'me'}/{given['name']}"
        if name in self.state.repos:
            self.reply(409, {"error": "exists", "url": f"{self.state.url}/{name}"})
            return
        self.state.commit(name, {".gitattributes": b"* text\n"})
        self.reply(200, {"url": f"{self.state.url}/{name}", "id": name})

    def validate(self):
        content = json.loads(self.body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no metadata"}]
        self.reply(200 if not errors else 400, {"errors": errors, "warnings": []})

    def preupload(self, repo, revision, **_):
        if self.found(repo, revision) is None:
            return
        files = [
            {"path": file["path"], "shouldIgnore": False,
             "uploadMode": "lfs" if file["size"] > LFS_FROM else "regular"}
            for file in json.loads(self.body)["files"]
        ]  # fmt: skip
        self.reply(200, {"files": files})

    def batch(self, repo):
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            item = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.state.blobs:
                href = f"{self.state.url}/upload/{wanted['oid']}"
                item["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(item)
        kind = {"Content-Type": "application/vnd.git-lfs+json"}
        self.reply(200, {"transfer": "basic", "objects": objects}, kind)

    def upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.reply(400, {"error": "other content"})
            return
        self.state.blobs[oid] = self.body
        self.reply(200, {})

    def receive_commit(self, repo, revision, **_):
        if (head := self.found(repo, revision)) is None:
            return
        if self.state.before_commit is not None:
            self.state.before_commit()
            head = self.state.tree(repo, revision)
        changes, deleted, parent = {}, [], None
        for line in self.body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                parent = value.get("parentCommit")
            elif item["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                changes[value["path"]] = self.state.blobs[value["oid"]]
            elif item["key"] in ("deletedFile", "deletedFolder"):
                path = value["path"].rstrip("/")
                there = [p for p in head[1] if p == path or p.startswith(path + "/")]
                if not there:
                    self.reply(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
                    return
                deleted.append(path)
        if parent not in (None, head[0]):
            self.reply(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        sha = self.state.commit(repo, changes, deleted)
        url = f"{self.state.url}/{repo}/commit/{sha}"
        self.reply(200, {"success": True, "commitOid": sha, "commitUrl": url})


def _oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate),
    (("POST",), rf"/api/models/{_REPO}/preupload/([^/]+)", _Handler.preupload),
    (("POST",), rf"/api/models/{_REPO}/commit/([^/]+)", _Handler.receive_commit),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), r"/upload/([0-9a-f]{64})", _Handler.upload),
    (("GET",), rf"/api/models/{_REPO}/tree/([^/]+)(?:/(.+))?", _Handler.list_tree),
    (("GET",), rf"/api/models/{_REPO}(?:/revision/([^/]+))?", lambda self, repo, revision, **_:
        self.info(repo, revision or "main")),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/([^/]+)/(.+)", lambda self, repo, revision, path, **_:
        self.resolve(repo, revision, path)),
]  # fmt: skip
