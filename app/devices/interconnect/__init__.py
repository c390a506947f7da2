"""Links between devices, as the driver reports them and as they were measured.

Imports no other subject of the app but `split`.
"""
