"""Bugs to plant in the disk tier; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

DISK = "tests/offload/test_disk.py"
FAULTS = "tests/offload/test_disk_faults.py"
NIXL = "tests/offload/test_nixl_files.py"

ON_DISK = (
    Mutation(
        "page digest not compared",
        "rayk/offload/page_file.py",
        'return "" if blake2b(page, digest_size=_DIGEST_BYTES).digest() == page_digest else FLIPPED',
        'return "" if len(page_digest) == _DIGEST_BYTES else FLIPPED',
        f"{FAULTS}::test_every_damaged_file_is_reported_and_none_is_served",
    ),
    Mutation(
        "header digest not compared",
        "rayk/offload/page_file.py",
        "if magic != _MAGIC or blake2b(fields, digest_size=_DIGEST_BYTES).digest() != own:",
        "if magic != _MAGIC:",
        f"{FAULTS}::test_every_bit_of_the_header_counts",
    ),
    Mutation(
        "a file of another model is served",
        "rayk/offload/page_file.py",
        'return "" if (group, num_bytes, digest, key) == asked else FOREIGN',
        'return "" if (group, num_bytes, key) == (asked[0], asked[1], asked[3]) else FOREIGN',
        f"{FAULTS}::test_a_file_of_another_model_or_dtype_is_foreign",
    ),
    Mutation(
        "a file of another key is served",
        "rayk/offload/page_file.py",
        'return "" if (group, num_bytes, digest, key) == asked else FOREIGN',
        'return "" if (group, num_bytes, digest) == asked[:3] else FOREIGN',
        f"{FAULTS}::test_pages_that_changed_places_are_foreign",
    ),
    Mutation(
        "the identity forgets the page sizes",
        "rayk/offload/page_file.py",
        '"page_bytes": self.page_bytes, "format_version"',
        '"page_bytes": 0, "format_version"',
        f"{DISK}::test_identities_differ_in_every_fact",
    ),
    Mutation(
        "the identity forgets the format version",
        "rayk/offload/page_file.py",
        ', "format_version": FORMAT_VERSION}',
        "}",
        f"{FAULTS}::test_a_file_of_another_format_version_is_foreign",
    ),
    Mutation(
        "pages written in place",
        "rayk/offload/disk_threads.py",
        "temporary = self._folder.new_temporary()",
        "temporary = job.file",
        f"{DISK}::test_pages_come_back",
    ),
    Mutation(
        "a short write is renamed",
        "rayk/offload/disk_threads.py",
        "if os.fstat(descriptor).st_size != sum(p.nbytes for p in parts):",
        "if os.fstat(descriptor).st_size > sum(p.nbytes for p in parts):",
        f"{FAULTS}::test_a_store_that_writes_too_little_leaves_no_page",
    ),
    Mutation(
        "a full disk is tried again and again",
        "rayk/offload/disk_threads.py",
        "                self._error = error\n",
        "                return error\n",
        f"{FAULTS}::test_after_an_error_the_disk_is_left_alone",
    ),
    Mutation(
        "a second owner is let in",
        "rayk/offload/disk_folder.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        f"{DISK}::test_a_second_process_is_refused_and_other_pages_are_apart",
    ),
    Mutation(
        "a faster process's secret is replaced",
        "rayk/offload/disk_folder.py",
        "self.new_temporary(), os.link)",
        "self.new_temporary(), os.replace)",
        f"{DISK}::test_a_secret_made_meanwhile_is_kept",
    ),
    Mutation(
        "leftovers stay",
        "rayk/offload/disk_folder.py",
        "            Path(path).unlink()\n",
        "            Path(path)\n",
        f"{DISK}::test_a_killed_writer_leaves_whole_pages_only",
    ),
    Mutation(
        "found in the order of names",
        "rayk/offload/disk_folder.py",
        "found.sort(key=lambda row: row[:2])",
        "found.sort(key=lambda row: row[1])",
        f"{DISK}::test_the_order_of_use_survives_a_restart",
    ),
    Mutation(
        "a page that is read stays old",
        "rayk/offload/disk.py",
        "            held.num_readers += 1\n            self._held.move_to_end(name)\n",
        "            held.num_readers += 1\n",
        f"{DISK}::test_the_page_used_longest_ago_goes_first",
    ),
    Mutation(
        "a page being read is evicted",
        "rayk/offload/disk.py",
        "for name, held in self._held.items() if not held.num_readers), None)",
        "for name, held in self._held.items() if held), None)",
        f"{DISK}::test_a_page_being_read_is_not_evicted",
    ),
    Mutation(
        "pages being written count for nothing",
        "rayk/offload/disk.py",
        "        self._used += self._sizes[name.group]\n        self._writing[name] = [done]",
        "        self._writing[name] = [done]",
        f"{DISK}::test_the_disk_never_takes_more_than_the_capacity",
    ),
    Mutation(
        "an old answer takes a new page away",
        "rayk/offload/disk.py",
        "if self._held.get(name) is not held:",
        "if name not in self._held:",
        f"{FAULTS}::test_one_bad_page_read_twice_at_once_is_put_anew",
    ),
    Mutation(
        "a bad disk stays on",
        "rayk/offload/disk.py",
        "            self._heed(error)\n        self._ready",
        "        self._ready",
        f"{FAULTS}::test_any_error_of_the_disk_turns_it_off",
    ),
    Mutation(
        "too many open files turn the tier off",
        "rayk/offload/disk.py",
        "if error is None or self._off or (isinstance(error, OSError) and error.errno in TRANSIENT):",
        "if error is None or self._off:",
        f"{FAULTS}::test_too_many_open_files_are_not_the_disks_fault",
    ),
    Mutation(
        "a bad page is remembered",
        "rayk/offload/disk.py",
        "            self._report(name, result)\n        self._remove(name)",
        "            self._report(name, result)\n            return\n        self._remove(name)",
        f"{FAULTS}::test_every_damaged_file_is_reported_and_none_is_served",
    ),
    Mutation(
        "closing waits for a hung disk",
        "rayk/offload/disk_threads.py",
        "thread.join(max(0.0, deadline - time.monotonic()))",
        "thread.join()",
        f"{FAULTS}::test_closing_takes_bounded_time_on_a_disk_that_hangs",
    ),
    Mutation(
        "a failed transfer's buffer is used again",
        "rayk/transfer/nixl_files.py",
        'self._failure, self._kept = f"failed: {error!r}", kept',
        "self._kept = kept",
        f"{NIXL}::test_a_failed_store_stays_failed",
    ),
    Mutation(
        "all parts are read from the file's start",
        "rayk/transfer/nixl_files.py",
        "                at += part.nbytes\n",
        "",
        f"{NIXL}::test_parts_stand_one_after_the_other",
    ),
    Mutation(
        "pages go through NIXL where it is missing",
        "rayk/offload/page_store.py",
        "    except DeviceError as error:\n",
        "    except DeviceError as error:\n        raise\n",
        f"{NIXL}::test_plain_files_where_the_backend_is_missing",
    ),
)
