"""All writes of the program, the cache folder, locks between processes, and bounded reads. No torch."""

from fivefold.files.guarded import guard, inside
from fivefold.files.locks import Post, held, in_use, locked, owned, posts
from fivefold.files.reading import (
    BROKEN,
    MOST_INDEX,
    MOST_JSON,
    MOST_TRACE,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    understood,
)
from fivefold.files.writing import (
    NO_ROOM,
    Lines,
    cache_folder,
    expanded,
    flush,
    flush_all,
    make_folder,
    numbered_folder,
    own_word,
    remove,
    rename,
    stream,
    stream_on,
    writable,
    write,
    write_atomically,
)
