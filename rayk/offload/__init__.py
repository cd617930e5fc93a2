"""KV pages kept outside the engines: in host memory, and on disk.

A page is a block of one group in canonical form, the same bytes whatever engine stored it. `host` is the tier
in memory, an engine without a model: it reads from engines' ranks to store and they read from it to load;
`messages` is what it is asked and answers, `costs` weighs moving KV against computing it, `geometry` says
where its pages lie. `outbox` is the host memory into which a GPU's rank copies what it stores. `pages` stands
between its blocks and the pages of `disk`, which keeps them in files of one folder (`page_file` is the format
of one, `disk_folder` whose folder it is and what was found in it, `disk_io` what waits for the disk).
"""
