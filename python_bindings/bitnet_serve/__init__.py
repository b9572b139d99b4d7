"""Serve packed models over HTTP, in the forms that clients of OpenAI's API send.

    bitnet serve model.bitnet

Needs the extra `serve`. Read `scheduler.py` for how requests share a model, `app.py` for the endpoints.
"""
