"""Pictures that go with questions: kept beside their chat, shown, and named in its prompts.

`picture` is what a message keeps of one; `folder` has the files; `program` is the child that reads
them, `desk` asks it; `draft` has those of the message that is being written, `album` shows those of
messages. `picture`, `folder` and `program` know no Qt.
"""
