"""Small widgets that several subjects use.

Imports no subject of the app.
"""
