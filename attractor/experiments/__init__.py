"""One file per table or figure. Each writes a JSON result; tables are printed from JSON only."""
