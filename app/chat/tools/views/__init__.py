"""Widgets of calls: a card for each, and the cards of an answer."""
