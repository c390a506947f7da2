"""Texts that act on what shows them: escape sequences for terminals, HTML for labels."""

ACTING = frozenset(
    chr(code)
    for codes in (
        range(0x20), range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A),
        (0xD800, 0xDC9B, 0xDFFF),
    )
    for code in codes
) - {"\n", "\t"}  # fmt: skip
"""Control characters, those that change the direction of text, and some halves of characters."""

ESCAPES = (
    "\x1b[31mred\x1b[0m",  # colours
    "\x1b[2J\x1b[H$ rm -rf ~",  # clears the screen and writes a prompt
    "\x1b]0;title\x07",  # the terminal's title
    "\x1b]52;c;cm0gLXJmIH4K\x07",  # the clipboard
    "\x1b]8;;https://bad.example\x1b\\good\x1b]8;;\x1b\\",  # a link
    "\x1b[6n",  # the terminal answers, as if it were typed
    "\x1bP+q544e\x1b\\",
    "\x9b31mred",  # the same in one character
    "\x9d0;title\x9c",
    "\x90q\x9c",
    "one\rtwo",  # over what was there
    "one\x08\x08\x08two",
    "bell\x07",
    "\x0e\x0f",
    "zero\0byte",
    "\x7f",
    "photo_\u202egpj.exe",  # reads photo_exe.jpg
    "\u202dx\u202c",
    "\u2066a\u2069\u2067b\u2068",
    "name\udc9b31m.gguf",  # a byte of a file name that is no UTF-8
)
"""Texts that a terminal obeys, or that look like others."""

PAGES = (
    "<img src='file:///etc/hostname'>",
    '<img src="https://track.example/pixel.png" width=9000 height=9000>',
    "<b>bold</b>",
    "words <a href='file:///etc/passwd'>words</a>",
    "<h1>Update needed",
    "\n\n<table><tr><td>x</table>",
    "<!doctype html><p>x",
    "<?xml version='1.0'?><b>x</b>",
    "a &lt;b&gt; c",
    "Q&A & \"both\" 'quotes'",
    '<p style="white-space:pre-wrap">ours?</p>',
    "<style>*{color:red}</style>",
)
"""Texts that Qt takes for HTML, or for keys of a menu."""


def acting(text: str) -> list[str]:
    """Return the characters of a text that act."""
    return [character for character in text if character in ACTING]
