"""What a loaded model is asked between two passes of its answers: questions, answers, who answers.

Imports no front end: neither `api` nor `host`, and not `events`, which names the questions.
"""
