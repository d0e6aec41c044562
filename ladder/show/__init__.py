"""What reads logs and shows them: tables, pictures, the tutorial page. Nothing here runs a script."""
