"""Files that go with a message: read and counted in a child process, and shown as chips.

`documents` and `program` know no Qt; `attachment` is what a message keeps; `draft` has the files of
the message that is being written, `reader` has them read, `presenter` connects both with the
composer.
"""
