"""Adding to a library on the hub, and removing from it: one commit each, whole or not at all."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cgmerge.errors import EnvironmentProblem, InputError, UsageError
from cgmerge.modules.library.admit import PAGE, Item
from cgmerge.modules.library.entry import Entry, file_name, is_digest
from cgmerge.modules.library.folder import check_copy
from cgmerge.modules.library.hub import Repository
from cgmerge.modules.library.library import (
    check_is_library_or_free,
    find,
    listing,
    missing_files,
    new_mark,
)
from cgmerge.modules.library.page import expert_page, library_page, with_front
from cgmerge.modules.library.store import ENTRIES, MARK, OBJECTS, Source
from cgmerge.modules.library.writing import Added, Removed, same_name
from cgmerge.tensorfile import file_sha256

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_TRIES = 10
_CONFLICT = (409, 412)


def add(url: str, items: Sequence[Item], *, overwrite: bool, private: bool = False) -> Added:
    """Store experts in a repository, made where there is none.

    Raises:
        UsageError: A name is taken, or the repository is something else.
        EnvironmentProblem: The hub refused.
    """

    def change(repository: Repository) -> "tuple[Added, list[Any]]":
        done = Added()
        operations: list[Any] = []
        old_entries: dict[str, Entry] = {}
        if check_is_library_or_free(repository):
            old_entries = {entry.file_name: entry for entry in listing(repository).entries}
        else:
            operations.append(_put(MARK, new_mark()))
        for item in items:
            entry = item.entry
            old = same_name(repository, entry, overwrite=overwrite)
            stored = not missing_files(repository, entry)
            if not stored:
                operations += list(_objects(item))
            if old == entry and stored:
                done.same.append(entry.name)
                continue
            (done.replaced if old is not None else done.new).append(entry.name)
            operations.append(_put(f"{ENTRIES}/{entry.file_name}", entry.to_bytes()))
            old_entries[entry.file_name] = entry
        if operations:
            page = library_page(list(old_entries.values()), repository.ref.repo)
            operations.append(_put(PAGE, page.encode()))
        return done, operations

    names = ", ".join(item.entry.name for item in items)
    made: Added = _committed(url, change, f"Add {names}"[:200], create=True, private=private)
    return made


def remove(url: str, names: Sequence[str], *, dry_run: bool) -> Removed:
    """Remove experts, or, without names, objects that no entry refers to."""

    def change(repository: Repository) -> "tuple[Removed, list[Any]]":
        found = listing(repository)
        done, files, digests = Removed(), set(), set()
        for name in names:
            try:
                entry = find(repository, name)
            except InputError:
                done.names.append(name)
            else:
                done.names.append(entry.name)
                digests.add(entry.digest)
            files.add(file_name(name))
        kept = [entry for entry in found.entries if entry.file_name not in files]
        if not names:
            digests = {name for name in repository.names(OBJECTS) if is_digest(name)}
        broken = [bad for bad in found.bad if bad.file not in files]
        loose = sorted(digests - {entry.digest for entry in kept}) if not broken else []
        if broken and not names:
            raise broken[0].error
        for digest in loose:
            done.freed += sum(repository.sizes(f"{OBJECTS}/{digest}").values())
            done.objects.append(digest)
        operations: list[Any] = [_drop(f"{ENTRIES}/{file}") for file in sorted(files)]
        operations += [_drop(f"{OBJECTS}/{digest}/") for digest in loose]
        if operations:
            operations.append(_put(PAGE, library_page(kept, repository.ref.repo).encode()))
        return done, [] if dry_run else operations

    message = f"Remove {', '.join(names) or 'what is not used'}"[:200]
    gone: Removed = _committed(url, change, message)
    return gone


def publish(url: str, item: Item, *, overwrite: bool, private: bool = False) -> None:
    """Write an expert as a repository of its own, which PEFT loads by name.

    Raises:
        UsageError: The repository holds another expert, or a library.
        EnvironmentProblem: The hub refused.
    """
    entry = item.entry

    def change(repository: Repository) -> "tuple[None, list[Any]]":
        there = set(repository.names("")) if repository.commit else set()
        if MARK in there or (not overwrite and there & set(entry.files)):
            kind = "is a library" if MARK in there else "holds an expert already"
            raise UsageError(
                f"{url} {kind}",
                code="name_taken",
                hint=f"push to {url}/{entry.name}" if MARK in there else "add --overwrite",
            )
        sources = {name: source for name, source in item.sources.items() if name != PAGE}
        own = item.sources.get(PAGE)
        page = expert_page(entry, repository.ref.repo)
        if own is not None:
            page = with_front(own.path.read_text("utf-8"), entry)
        operations = [_file(name, source) for name, source in sources.items()]
        return None, [*operations, _put(PAGE, page.encode())]

    _committed(url, change, f"Add {entry.name}", create=True, private=private)


def _committed(
    url: str,
    change: Callable[[Repository], Any],
    message: str,
    *,
    create: bool = False,
    private: bool = False,
) -> Any:
    """Make a change on top of the newest commit; again, where that is no longer the newest."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    for _ in range(_TRIES):
        repository = Repository(url)
        branch = repository.ref.revision
        head = repository.head()
        if head is None and create:
            with repository.errors("the new repository"):
                api.create_repo(repository.ref.repo, private=private or None, exist_ok=True)
            head = repository.head()
        repository.commit = head
        done, operations = change(repository)
        if not operations:
            return done
        try:
            with repository.errors(message):
                api.create_commit(
                    repository.ref.repo,
                    operations,
                    commit_message=message,
                    revision=branch,
                    parent_commit=head,
                )
        except EnvironmentProblem as error:
            cause = error.__cause__
            if isinstance(cause, HfHubHTTPError) and cause.response.status_code in _CONFLICT:
                continue
            raise
        return done
    raise EnvironmentProblem(
        f"{url} was changed by others {_TRIES} times in a row", code="hub", hint="try again"
    )


def _objects(item: Item) -> "Iterator[CommitOperationAdd]":
    for name, source in item.sources.items():
        path = f"{OBJECTS}/{item.entry.digest}/{name}"
        yield _file(path, source)


def _file(path: str, source: Source) -> "CommitOperationAdd":
    from huggingface_hub import CommitOperationAdd

    check_copy(source, file_sha256(source.path, follow_links=False))
    return CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(source.path))


def _put(path: str, data: bytes) -> "CommitOperationAdd":
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(path_in_repo=path, path_or_fileobj=data)


def _drop(path: str) -> "CommitOperationDelete":
    from huggingface_hub import CommitOperationDelete

    return CommitOperationDelete(path_in_repo=path)
