"""How answers look: tables for a terminal, a notebook and a page, and small pictures for a notebook."""
