"""One offline page that steps through the rounds of a collective."""

from __future__ import annotations

import json
from html import escape

from fivefold.observe.document import asset, document
from fivefold.schedules.collectives import Collective
from fivefold.schedules.collectives.draw import head, shares, words


def page(collective: Collective, ends: list[str], note: str = "") -> str:
    """The page. ends: the time after each round, as text. note: where these times come from."""
    cells = shares(collective)
    rounds = [{"moves": [], "cells": cells[0], "words": "what every rank begins with", "end": ""}]
    for moves, after, end in zip(collective.rounds, cells[1:], ends, strict=True):
        pairs = dict.fromkeys((move.source, move.target, move.reduce) for move in moves)
        rounds.append({"moves": list(pairs), "cells": after, "words": "   ".join(words(moves)), "end": end})
    data = json.dumps({"ranks": collective.ranks, "rounds": rounds}).replace("<", "\\u003c")
    title = head(collective)
    body = f"""<header><p class="kicker">Collective</p><h1>{escape(title)}</h1>
<p class="lead">{escape(note)} Arrow keys step. Blue arrows add, green arrows copy. A rank's cells are its
chunks, filled by the share of contributions that they contain.</p></header>
<main><div class="steps"><button id="back" aria-label="previous round">‹</button>
<button id="next" aria-label="next round">›</button>
<button id="play">Play</button><input id="round" type="range" min="0" max="{len(collective.rounds)}" value="0"
aria-label="round"><span id="where"></span></div>
<p id="moves"></p>
<svg id="stage" viewBox="0 0 640 640" role="img" aria-label="{escape(title)}"></svg></main>
<script type="application/json" id="data">{data}</script>"""
    return document(title, body, asset("report.css") + asset("collective.css"), asset("collective.js"))
