"""The page at ``/``: what this node's ranks hold now, for a human with a browser and no other server.

    choice     which rank and device a query asks for          palette    a colour and a texture for each reftype
    view       what the page says, from a snapshot             treemap    sizes to rectangles
    detail     the same of one rank                            timeline   a ring of steps to columns
    render     the view as bytes of HTML                       drawing    both as SVG
                                                               page.html  page.css  page.js

Invariants: nothing happens unless somebody asks; looking takes nothing away from any consumer of the metrics; the
browser is asked to fetch nothing but the page itself; every text of a record is escaped and cut; at most
``render.MAX_PAGE_BYTES``.
"""
