// The order of the results of the site's search. Without it, pages with equal scores are sorted by title, and decisions, whose titles
// begin with numbers, come first. The numbers below `score` are Sphinx's defaults.
var Scorer = {
  score: ([page, , , , score]) => {
    if (/^(decisions|project)\/|^(ARCHITECTURE|MODEL|originals)$/.test(page)) return score - 20;
    if (/^(index|installation|quickstart|faq)$/.test(page)) return score + 3;
    if (/^(guides\/|tutorial|which_class|concepts|stepping|episodes|faults|results|TROUBLE|LIMITS|kernels|observe|performance|scaling)/.test(page)) return score + 2;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
