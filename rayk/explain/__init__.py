"""Explain what a pair of engines would transfer, and what any byte of theirs means, without running anything.
`explanation` plans both engines and their reads; `reads` describes one transfer; `places` names a byte of a
rank's buffer, and finds a named one; `text` and `drawing` put an explanation into words, SVG and HTML."""
