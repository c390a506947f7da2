"""Export and import of chats: PDF and the dialogs."""
