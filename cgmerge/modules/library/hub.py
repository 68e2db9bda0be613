"""A library, or one expert, in a repository on the Hugging Face Hub.

Everything is read at one commit and through the hub's own cache, so that what was used once can
be used offline (`HF_HUB_OFFLINE`). Writing is one commit on top of the one that was read; where
somebody else was faster it is made again.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cgmerge.errors import (
    CgmergeError,
    EnvironmentProblem,
    NotFound,
    UsageError,
)
from cgmerge.modules.library.store import HUB
from cgmerge.tensorfile import open_regular, read_small

_PIECE = 1 << 22
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, slots=True)
class HubRef:
    """`hf://user/repo[/name][@revision]`."""

    repo: str
    name: str | None
    revision: str | None

    @property
    def library(self) -> str:
        """Return the reference of the repository alone."""
        return f"{HUB}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def parse_ref(ref: str) -> HubRef:
    """Read a reference to the hub.

    Raises:
        UsageError: Malformed.
    """
    path, _, revision = ref.removeprefix(HUB).partition("@")
    parts = path.rstrip("/").split("/")
    repo, name = "/".join(parts[:2]), "/".join(parts[2:])
    if not _REPO.fullmatch(repo) or "/" in name:
        raise UsageError(
            f"{ref} is not a hub reference",
            code="ref",
            hint=f"write {HUB}user/repo, {HUB}user/repo/NAME for an expert of a library, and"
            " @REVISION after it",
        )
    return HubRef(repo, name or None, revision or None)


class Repository:
    """The files of a repository at one commit; see `Store`.

    Args:
        ref: `hf://user/repo[@revision]`; the revision is looked up once.
        offline: Use the cache only, as under `HF_HUB_OFFLINE`.
    """

    def __init__(self, ref: str, *, offline: bool = False) -> None:
        self.offline = offline or _offline()
        self.ref = parse_ref(ref)
        self.url = ref
        self.commit: str | None = None

    @property
    def revision(self) -> str | None:
        """Return the commit, once it is known, else what was asked for."""
        return self.commit or self.ref.revision

    def names(self, folder: str) -> list[str]:
        """Return what is directly inside a folder, sorted."""
        return sorted(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name and bytes of the files directly inside a folder; -1 for folders."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        if self.offline:
            return self._cached_sizes(folder)
        try:
            with self.errors(folder or "its files"):
                found = list(
                    HfApi().list_repo_tree(self.ref.repo, folder or None, revision=self.revision)
                )
        except (EntryNotFoundError, NotFound):
            return {}
        sizes = {
            item.path.rpartition("/")[2]: item.size if isinstance(item, RepoFile) else -1
            for item in found
        }
        return {name: size for name, size in sizes.items() if not name.startswith(".")}

    def read(self, path: str, *, limit: int) -> bytes:
        """Read a small file whole."""
        return read_small(self.file(path), limit=limit, follow_links=True)

    def read_all(self, folder: str, *, limit: int) -> Iterator[tuple[str, bytes | CgmergeError]]:
        """Read all files of a folder, fetched many at a time."""
        from huggingface_hub import snapshot_download

        if self.offline:
            raise EnvironmentProblem(
                f"{self.ref.library} cannot be listed: nobody may be asked what is there",
                code="offline",
                hint="experts that were used before can be used by their names; unset"
                " HF_HUB_OFFLINE to see all",
            )
        names = self.names(folder)
        if not names:
            return
        with self.errors(folder):
            place = snapshot_download(
                self.ref.repo,
                revision=self.revision,
                allow_patterns=[f"{folder}/*"],
                local_files_only=self.offline,
            )
        for name in names:
            try:
                path = Path(place, folder, name)
                yield name, read_small(path, limit=limit, follow_links=True)
            except CgmergeError as error:
                yield name, error

    def chunks(self, path: str) -> Iterator[bytes]:
        """Read a large file piece by piece."""
        handle = open_regular(self.file(path), follow_links=True)  # the hub's cache has links
        with os.fdopen(handle, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def local(self, path: str) -> Path | None:
        """Return None: the hub's cache consists of links."""

    def file(self, path: str) -> Path:
        """Fetch a file into the hub's cache.

        Raises:
            NotFound: The repository has no such file.
            EnvironmentProblem: It cannot be reached, or is not in the cache while offline.
        """
        from huggingface_hub import hf_hub_download

        with self.errors(path):
            found = Path(
                hf_hub_download(
                    self.ref.repo, path, revision=self.revision, local_files_only=self.offline
                )
            )
        parts = found.parts
        self.commit = parts[len(parts) - 1 - parts[::-1].index("snapshots") + 1]
        return found

    def head(self) -> str | None:
        """Return the newest commit of the branch; None where there is no such repository."""
        from huggingface_hub import HfApi

        try:
            with self.errors("the repository"):
                return HfApi().model_info(self.ref.repo, revision=self.ref.revision).sha
        except NotFound:
            return None

    def newest(self) -> str:
        """Return the commit that the reference means now.

        Raises:
            NotFound: No such repository or revision.
            EnvironmentProblem: The hub cannot be reached.
        """
        found = self.head()
        if found is None:
            raise NotFound(f"no such repository or revision: {self.ref.library}", code="hub")
        return found

    def _cached_sizes(self, folder: str) -> dict[str, int]:
        from huggingface_hub import snapshot_download

        with self.errors(folder or "its files"):
            place = snapshot_download(self.ref.repo, revision=self.revision, local_files_only=True)
        inside = Path(place, folder)
        files = inside.iterdir() if inside.is_dir() else ()
        return {path.name: path.stat().st_size if path.is_file() else -1 for path in files}

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn what the hub's client raises into errors of ours."""
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RemoteEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        where = f"{self.ref.library}: {what}"
        refused: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, *_roots(HfHubHTTPError))
        try:
            with _without_bars():
                yield
        except RemoteEntryNotFoundError as error:
            raise NotFound(f"{where} does not exist", code="file") from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            if self.offline:
                raise EnvironmentProblem(
                    f"{where} is not in the cache of the hub, and nobody may be asked",
                    code="offline",
                    hint=f"write {self.ref.library}, with HF_HUB_OFFLINE unset, to fetch it once",
                ) from error
            raise self._unreachable(where, error) from error
        except GatedRepoError as error:
            raise self._unreachable(where, error) from error
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise NotFound(
                f"{where}: no such repository or revision, or not for you",
                code="hub",
                hint="check the name; private ones need `hf auth login`",
            ) from error
        except refused as error:
            raise self._unreachable(where, error) from error
        except (RuntimeError, ValueError) as error:  # an upload that broke; a page it cannot read
            raise self._unreachable(where, error.__cause__ or error) from error

    def _unreachable(self, where: str, error: BaseException) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{where}: the hub cannot be used: {error}",
            code="hub",
            hint="check the name and the connection, or pass a local folder",
        )


def _roots(error: type[Exception]) -> list[type[Exception]]:
    """Return what errors of the client's transport begin with: it need be no OSError."""
    bases = [kind for kind in error.__mro__ if issubclass(kind, Exception)]
    return [kind for kind in bases if kind.__name__ == "HTTPError"]


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the client's bars off what is no terminal."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    quiet = sys.stderr.isatty() or are_progress_bars_disabled()
    if not quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if not quiet:
            enable_progress_bars()


def _offline() -> bool:
    from huggingface_hub import is_offline_mode

    return is_offline_mode()
