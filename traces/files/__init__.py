"""Files that are written whole or not at all, and what JSON and Parquet files say of themselves."""
