"""A small stand-in for lm-evaluation-harness: it asks as the harness does and returns what it does.

Shapes, keys and the order of calls are those of `lm_eval.evaluator.evaluate` 0.4.13, as the tests
beside it that run the real one confirm.
"""

from dataclasses import dataclass

from cgmerge.evals.lmeval.harness import TaskInfo


@dataclass
class Request:
    """A request of the harness: what is asked, and for which task."""

    args: tuple
    task_name: str


class StandIn:
    """Tasks of rows `{"context": …, "answers": [...], "target": place}`, or of texts to write.

    A row with `answers` is multiple choice; one with `until` is generated and compared.
    """

    version = "stand-in"

    def __init__(self, **tasks):
        self.rows = tasks
        self.tasks = [TaskInfo(name, f"{name}.yaml", name[:1] * 64) for name in tasks]
        self.asked = 0

    def requests(self, limit):
        return [request for name in self.rows for row in self._rows(name, limit)
                for request in self._requests(name, row)]  # fmt: skip

    def _rows(self, name, limit):
        return self.rows[name][:limit]

    def _requests(self, name, row):
        if "until" in row:
            options = {"until": row["until"], "do_sample": False, "max_gen_toks": row["most"]}
            return [Request((row["context"], options), name)]
        return [Request((row["context"], answer), name) for answer in row["answers"]]

    def ask(self, model, limit):
        self.asked += 1
        samples = {name: [] for name in self.rows}
        results = {}
        for name in self.rows:
            for place, row in enumerate(self._rows(name, limit)):
                requests = self._requests(name, row)
                call = model.generate_until if "until" in row else model.loglikelihood
                samples[name].append(_sample(place, row, requests, call(requests)))
            results[name] = {"alias": name} | {
                f"{metric},none": sum(one[metric] for one in samples[name]) / len(samples[name])
                for metric in samples[name][0]["metrics"]
                if not isinstance(samples[name][0][metric], tuple)
            }
        better = {name: dict.fromkeys(s[0]["metrics"], True) for name, s in samples.items()}
        return {"results": results, "samples": samples, "higher_is_better": better}


def _sample(place, row, requests, answers):
    if "until" in row:
        said = answers[0].strip()
        metrics = {"exact_match": float(said == row["target"])}
        filtered = [said]
    else:
        logliks = [loglik for loglik, _ in answers]
        best = max(range(len(logliks)), key=logliks.__getitem__)
        norm = [loglik / len(text) for loglik, text in zip(logliks, row["answers"], strict=True)]
        metrics = {
            "acc": 1.0 if best == row["target"] else 0.0,
            "acc_norm": 1.0 if norm.index(max(norm)) == row["target"] else 0.0,
            "f1": (row["target"], best),
        }
        filtered = answers
    return {
        "doc_id": place,
        "doc": row,
        "target": row["target"],
        "arguments": [one.args for one in requests],
        "resps": [[answer] for answer in answers],
        "filtered_resps": filtered,
        "filter": "none",
        "metrics": list(metrics),
        **metrics,
    }
