"""The frame of all pages: navigation, live updates, visitors, tables and charts."""
