"""Labels of features: from contexts, by a server or by local rules, and how well they hold on other contexts."""
