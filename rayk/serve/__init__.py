"""The OpenAI-compatible HTTP server: one FastAPI app over a Completer, and what runs it.

`app.make_app` puts the app together: `protocol` says what clients may send, `completions` and `chat` turn it
into Asks and Deltas into answers, `answers` follows the choices of one request, `replies` writes them and
notices clients that go, `text` owns the tokenizer, `templates` renders chats in bounded processes, `guard`
turns away what must not come in, `errors` says everything that went wrong in OpenAI's form, `metrics` counts,
`engines` shows what is behind a front and changes roles.
"""
