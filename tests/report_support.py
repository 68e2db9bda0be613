"""Reports made of strings of answers, and a reader of their pages."""

from html.parser import HTMLParser

from cgmerge.evals.report.page import Report, render_page
from cgmerge.evals.report.sections import make_sections, source_of

RIGHT, WRONG = "1" * 10, "0" * 10

DEMO = {
    "base": {"copy": WRONG, "sort": WRONG, "old": RIGHT},
    "copy": {"copy": RIGHT, "sort": WRONG, "old": RIGHT},
    "sort": {"copy": WRONG, "sort": RIGHT, "old": RIGHT},
    "ties": {"copy": RIGHT, "sort": "1111111110", "old": "1100000000"},
}
KINDS = {"copy": "expert", "sort": "expert"}


def sections_of(*evaluations, groups=None):
    sources = [source_of(f"r{i}.json", one, b"r%d" % i) for i, one in enumerate(evaluations)]
    return make_sections(sources, groups)


def page_of(*evaluations, groups=None, title="T", known=None):
    return render_page(
        Report(title, sections_of(*evaluations, groups=groups), known or {})
    ).decode()


class Page(HTMLParser):
    """Collects tags, attributes and text; complains about what is not closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *one) for one in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *one) for one in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
