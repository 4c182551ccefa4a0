# SPDX-License-Identifier: Apache-2.0
"""Reading text that comes in pieces of any size, tag by tag, in time linear in its length."""

from __future__ import annotations

import re

__all__ = ["SPACE", "Scanner", "Tags"]

SPACE = " \t\r\n"
"""White space between tags: that of XML, not Unicode's."""

_SPACES = re.compile(f"[{SPACE}]*")


class Tags:
    """Some tags to look for. A tag may hold ``<`` at its beginning only, and none is the beginning of another."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags
        self.longest = max(map(len, tags))
        self.pattern = re.compile("|".join(map(re.escape, tags)))

    def may_begin(self, text: str) -> bool:
        """Whether more text could make this one of the tags."""
        return any(tag.startswith(text) for tag in self.tags)


class Scanner:
    """The text that was not read yet: never more than an unfinished tag between pieces.

    Attributes:
        ended: No text will follow.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0

    def add(self, text: str) -> None:
        """Put more text behind what was not read."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def until(self, tags: Tags) -> tuple[str, str]:
        """Read up to the first of `tags`, and the tag.

        Without one (then it is ``""``) everything is read that cannot be the beginning of one.
        """
        start = self._at
        found = tags.pattern.search(self._text, start)
        if found is not None:
            self._at = found.end()
            return self._text[start : found.start()], found.group()
        end = len(self._text)
        if not self.ended:
            last = self._text.rfind("<", max(start, end - tags.longest))
            if last >= 0 and tags.may_begin(self._text[last:]):
                end = last
        self._at = end
        return self._text[start:end], ""

    def space(self) -> str:
        """Read white space, as much as there is."""
        found = _SPACES.match(self._text, self._at)
        assert found is not None  # the pattern matches the empty text
        self._at = found.end()
        return found.group()

    def next_of(self, tags: Tags) -> str | None:
        """Read one of `tags` if it comes next.

        Returns:
            The tag; ``""`` if something else comes, or nothing more; ``None`` if more text must decide.
        """
        found = tags.pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
            return found.group()
        return (
            None if not self.ended and tags.may_begin(self._text[self._at : self._at + tags.longest]) else ""
        )

    def back(self, tag: str) -> None:
        """Take back the reading of a tag."""
        self._at -= len(tag)

    def drop_cut(self, tags: Tags) -> None:
        """Drop what is left if the end of the text cut it off one of `tags`."""
        if self.ended and tags.may_begin(self._text[self._at :]):
            self._at = len(self._text)

    def rest(self) -> str:
        """Read everything."""
        text, self._at = self._text[self._at :], len(self._text)
        return text
