"""What reads logs and shows them: tables, pictures, the tutorial page, comparisons. Nothing here runs a script."""
