"""placeholder"""


def render(diff, title=None):
    return "<html></html>"
