"""The routes of the loopback Hub."""

import base64
import hashlib
import json
import re
import socket
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from loopback_repos import ORG, READ_TOKEN, WRITE_TOKEN, File, Repo, describe, git_hash, is_large


class Handler(BaseHTTPRequestHandler):
    hub: Any  # the LoopbackHub that it answers for
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.hub.connections.append(self.connection)

    def log_message(self, *_) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, content: dict | list | bytes, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str, message: str = "") -> None:
        self.reply(status, {"error": message or code}, {"X-Error-Code": code, "X-Error-Message": message or code})

    def break_connection(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def handle_any(self) -> None:
        self.url = urlsplit(self.path)
        path = unquote(self.url.path)
        line = f"{self.command} {path}"
        self.hub.requests.append(line + (f"?{unquote(self.url.query)}" if self.url.query else ""))
        for fault in self.hub.faults:
            if fault.times > 0 and re.search(fault.pattern, line):
                fault.times -= 1
                if fault.act is None:
                    return self.break_connection()
                if fault.act(self):
                    return None
        if path.startswith("/store/"):
            self.hub.store_headers.append(dict(self.headers))
            return self.store(path.removeprefix("/store/"))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in (WRITE_TOKEN, READ_TOKEN):
            self.body()
            message = "Invalid credentials in Authorization header"
            return self.reply(401, {"error": message}, {"X-Error-Message": message})
        self.may_write = token == WRITE_TOKEN
        for method, pattern, route in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split():
                return route(self, *found.groups())
        self.body()
        return self.refuse(404, "NoSuchRoute", f"the loopback Hub has no route {line}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def repo(self, name: str, write: bool = False) -> Repo | None:
        """The repo, or None and the refusal sent."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.headers.get("Authorization")):
            self.body()
            self.refuse(401 if not self.headers.get("Authorization") else 404, "RepoNotFound", "Repository not found")
        elif write and not self.may_write:
            self.body()
            self.refuse(403, "Forbidden", "you need write permission")
        else:
            return repo
        return None

    def files(self, repo: Repo, revision: str) -> tuple[str, dict[str, File]] | None:
        oid = repo.resolve(unquote(revision))
        if oid is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return oid, repo.commits[oid]

    # Routes

    def whoami(self) -> None:
        if not self.headers.get("Authorization"):
            return self.reply(401, {"error": "Unauthorized"})
        role = "write" if self.may_write else "read"
        return self.reply(
            200,
            {"name": "tester", "orgs": [{"name": ORG}], "auth": {"accessToken": {"role": role, "displayName": "t"}}},
        )

    def create(self) -> None:
        asked = json.loads(self.body())
        if not self.may_write or asked["organization"] != ORG:
            return self.refuse(403, "Forbidden", "you may not create repos here")
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repos:
            return self.reply(409, url | {"error": "You already created this model repo"})
        repo = Repo(name, private=asked.get("visibility") == "private")
        repo.commit({".gitattributes": File(b"*.safetensors filter=lfs\n", False)})
        self.hub.repos[name] = repo
        return self.reply(200, url)

    def validate_yaml(self) -> None:
        self.body()
        self.reply(200, {"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        if repo := self.repo(name, write=True):
            asked = json.loads(self.body())["files"]
            there = repo.commits[repo.branches[revision]]
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if is_large(one["path"]) else "regular"} for one in asked
            ]
            for one in modes:
                one["oid"] = there[one["path"]].etag if one["path"] in there else None
                one["shouldIgnore"] = False
            self.reply(200, {"files": modes})

    def lfs_batch(self, name: str) -> None:
        if self.repo(name, write=True):
            objects = []
            for one in json.loads(self.body())["objects"]:
                known = one["oid"] in self.hub.objects
                upload = {"upload": {"href": f"{self.hub.store_url}/{one['oid']}", "header": {}}}
                objects.append({"oid": one["oid"], "size": one["size"], **({} if known else {"actions": upload})})
            self.reply(200, {"objects": objects, "transfer": "basic"})

    def commit(self, name: str, branch: str) -> None:
        if not (repo := self.repo(name, write=True)):
            return None
        lines = [json.loads(line) for line in self.body().splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repo.branches[branch]):
            return self.refuse(412, "PreconditionFailed", "the branch has moved")
        files = dict(repo.commits[repo.branches[branch]])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.refuse(400, "BadRequest", f"{value['path']} was never uploaded")
                files[value["path"]] = File(self.hub.objects[value["oid"]], True)
            else:
                del files[value["path"]]
        oid = repo.commit(files, branch)
        return self.reply(200, {"commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def branch(self, name: str, branch: str) -> None:
        if repo := self.repo(name, write=True):
            self.body()
            if branch in repo.branches:
                return self.reply(409, {"error": "the branch exists"})
            repo.branches[branch] = repo.branches["main"]
            return self.reply(200, {})
        return None

    def tag(self, name: str, revision: str) -> None:
        if repo := self.repo(name, write=True):
            tag = json.loads(self.body())["tag"]
            if tag in repo.tags:
                return self.reply(409, {"error": "the tag exists"})
            repo.tags[tag] = repo.resolve(revision)
            return self.reply(200, {})
        return None

    def refs(self, name: str) -> None:
        if repo := self.repo(name):
            kinds = {"branches": ("heads", repo.branches), "tags": ("tags", repo.tags)}
            found = {
                key: [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in refs.items()]
                for key, (kind, refs) in kinds.items()
            }
            self.reply(200, {**found, "converts": []})

    def info(self, name: str, revision: str | None = None) -> None:
        if (repo := self.repo(name)) and (found := self.files(repo, revision or "main")):
            self.reply(200, describe(repo, *found))

    def tree(self, name: str, revision: str) -> None:
        if (repo := self.repo(name)) and (found := self.files(repo, revision)):
            entries = []
            for path, file in found[1].items():
                entry = {"type": "file", "path": path, "size": len(file.content), "oid": git_hash(file.content)}
                if file.large:
                    entry["lfs"] = {"oid": file.etag, "size": len(file.content), "pointerSize": 134}
                entries.append(entry)
            self.reply(200, entries)

    def models(self) -> None:
        query = parse_qs(self.url.query)
        wanted = set(query.get("filter", []))
        listed = [
            describe(repo, repo.branches["main"], repo.head) for repo in self.hub.repos.values() if not repo.private
        ]
        listed = [one for one in listed if wanted <= set(one["tags"])]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if len(listed) > start + self.hub.page:
            rest = re.sub(r"&cursor=\d+", "", self.url.query) + f"&cursor={start + self.hub.page}"
            headers["Link"] = f'<{self.hub.url}/api/models?{rest}>; rel="next"'
        self.reply(200, listed[start : start + self.hub.page], headers)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        if repo is None:
            return None
        if repo.gated:
            return self.refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        found = self.files(repo, revision)
        if found is None:
            return None
        oid, files = found
        headers = {"X-Repo-Commit": oid}
        if path not in files:
            return self.reply(404, {}, headers | {"X-Error-Code": "EntryNotFound"})
        file = files[path]
        if file.large:
            headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
            return self.reply(302, b"", headers | {"Location": f"{self.hub.store_url}/{file.etag}"})
        return self.send(file, headers)

    def send(self, file: File, headers: dict[str, str]) -> None:
        headers = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", **headers}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not start:
            return self.reply(200, file.content, headers)
        begin, size = int(start[1]), len(file.content)
        return self.reply(206, file.content[begin:], headers | {"Content-Range": f"bytes {begin}-{size - 1}/{size}"})

    def store(self, oid: str) -> None:
        if self.command == "PUT":
            content = self.body()
            if hashlib.sha256(content).hexdigest() != oid:
                return self.refuse(400, "BadDigest", "the content is not what its name says")
            self.hub.objects[oid] = content
            return self.reply(200, {})
        return self.send(File(self.hub.objects[oid], True), {})

    def collection_item(self, slug: str) -> None:
        asked = json.loads(self.body())["item"]["id"]
        if slug not in self.hub.collections:
            return self.reply(404, {"error": "no such collection"})
        items = self.hub.collections[slug]
        if asked in items:
            return self.reply(409, {"error": "it is in the collection"})
        items.append(asked)
        return self.collection(slug)

    def collection(self, slug: str) -> None:
        owner = {"_id": "0", "name": ORG, "type": "org", "avatarUrl": "", "fullname": ORG, "isHf": False}
        dates = {"lastUpdated": "2026-01-01T00:00:00.000Z"}
        facts = {"slug": slug, "title": slug, "owner": owner, "position": 0, "private": False, "theme": "blue"}
        self.reply(200, {**facts, **dates, "upvotes": 0, "items": []})


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", "/api/models", Handler.models),
    ("POST", f"/api/models/{NAME}/preupload/(.+)", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/(.+)", Handler.commit),
    ("POST", f"/api/models/{NAME}/branch/(.+)", Handler.branch),
    ("POST", f"/api/models/{NAME}/tag/(.+)", Handler.tag),
    ("GET", f"/api/models/{NAME}/refs", Handler.refs),
    ("GET", f"/api/models/{NAME}/tree/(.+)", Handler.tree),
    ("GET", f"/api/models/{NAME}/revision/(.+)", Handler.info),
    ("GET", f"/api/models/{NAME}", Handler.info),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("GET HEAD", f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("POST", "/api/collections/(.+)/items", Handler.collection_item),
    ("GET", "/api/collections/(.+)", Handler.collection),
)
