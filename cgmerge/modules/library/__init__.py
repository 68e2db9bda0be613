"""Libraries of experts: folders, URLs or repositories on the hub, all with one layout.

    cgmerge-library.json     says that this is a library, and of which version
    entries/NAME.json        one small file per expert, written last and replaced as a whole
    objects/DIGEST/FILE      what experts consist of; named by what it holds and never changed
    removing/…               marks of removals at work; empty otherwise

Readers take no locks: an entry names everything that belongs to it with its digest.
"""
