"""KV pages kept outside the engines: in host memory, and on disk.

A page is a block of one group in canonical form, the same bytes whatever engine stored it. `disk` keeps pages
in files of one folder (`page_file` is the format of one, `page_store` what moves its bytes, `disk_folder`
whose folder it is and what was found in it, `disk_threads` what waits for the disk).
"""
