"""Chats that leave for other programs, and come back: PDF, and the dialogs of export and import."""
