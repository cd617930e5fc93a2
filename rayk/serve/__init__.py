"""The OpenAI-compatible HTTP server: one FastAPI app over a Completer, and what runs it.

`app.make_app` puts the app together. `protocol` says what clients may send and `responses` what they get.
`completions` and `chat` parse requests (`request_parsing`) and write answers (`writer`); `choices` follows
the choices of one request, `replies` sends them and notices clients that leave. `text` owns the tokenizer,
`templates` renders chats and `forms` checks schemas, in processes that `children` bounds. `guard` turns away
what must not come in, `errors` writes failures in OpenAI's form, `metrics` counts, `engines` shows what is
behind a front and changes roles.
"""
