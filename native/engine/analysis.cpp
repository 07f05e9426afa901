#include "engine/analysis.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "engine/overloaded.h"

namespace topg {
namespace {

// Ids that a step reads and writes; the scratch row is nobody else's business.
struct Accesses {
  std::vector<int> buffers_read, buffers_written, activations_read, activations_written;
  bool selects = false, needs_all_rows = false, appends = false;
};

void add_op(const RowOp& op, Accesses& a) {
  const auto moves = [&](std::initializer_list<int> read, int written) {
    a.buffers_read.insert(a.buffers_read.end(), read);
    a.buffers_written.push_back(written);
  };
  std::visit(Overloaded{
                 [&](const EmbedOp& o) { moves({}, o.out), a.needs_all_rows = true; },
                 [&](const NormOp& o) { moves({o.input}, o.out); },
                 [&](const AddOp& o) { moves({o.left, o.right}, o.out); },
                 [&](const ScaleOp& o) { moves({o.input}, o.out); },
                 [&](const ActivateOp& o) { moves({o.input}, o.out); },
                 [&](const GateOp& o) { moves({o.gate, o.up}, o.out); },
                 [&](const SelectOp& o) { moves({o.input}, o.out), a.selects = true; },
                 [&](const PrepareOp& o) {
                   a.buffers_read.push_back(o.input);
                   a.activations_written.push_back(o.activations);
                 },
                 [&](const HeadsOp& o) {
                   moves({o.value, o.query}, o.query);
                   moves({o.key}, o.key);
                   a.appends = a.needs_all_rows = true;
                 },
             },
             op);
}

Accesses accesses_of(const ProgramStep& step) {
  Accesses a;
  const auto target = [&](int buffer, int activations) {
    if (buffer != kNone) a.buffers_written.push_back(buffer);
    if (activations != kNone) a.activations_written.push_back(activations);
  };
  std::visit(Overloaded{
                 [&](const RowStep& s) {
                   for (const RowOp& op : s.ops) add_op(op, a);
                 },
                 [&](const LinearStep& s) {
                   a.activations_read.push_back(s.x);
                   for (const LinearPart& part : s.parts) target(part.buffer, part.activations);
                   if (s.has_heads) a.appends = a.needs_all_rows = true;
                 },
                 [&](const AttentionStep& s) {
                   target(s.buffer, s.activations);
                   a.needs_all_rows = true;
                 },
                 [&](const LogitsStep& s) { a.activations_read.push_back(s.x); },
             },
             step);
  const auto drop_scratch = [](std::vector<int>& ids) {
    ids.erase(std::remove(ids.begin(), ids.end(), kScratch), ids.end());
  };
  drop_scratch(a.buffers_read);
  drop_scratch(a.buffers_written);
  return a;
}

bool contains(const std::vector<int>& ids, int id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

size_t find_first_selected(const std::vector<Accesses>& accesses) {
  size_t first = 0;
  while (first < accesses.size() && !accesses[first].selects) ++first;
  for (size_t i = first; i < accesses.size(); ++i) {
    if (accesses[i].needs_all_rows) {
      throw std::invalid_argument("step " + std::to_string(i) + " needs all rows of the step, after step " +
                                  std::to_string(first) + " has selected some of them");
    }
  }
  return first;
}

std::vector<bool> find_own_copies(const std::vector<ProgramStep>& steps, const std::vector<Accesses>& accesses) {
  std::vector<bool> own(steps.size(), false);
  for (size_t i = steps.size(); i-- > 0;) {
    const Accesses& a = accesses[i];
    if (!std::holds_alternative<RowStep>(steps[i]) || !a.buffers_written.empty() || a.appends) continue;
    size_t next = i + 1;  // the next step after which the threads meet
    while (next < steps.size() && own[next]) ++next;
    own[i] = next < steps.size() && std::none_of(a.buffers_read.begin(), a.buffers_read.end(), [&](int id) {
      return contains(accesses[next].buffers_written, id);
    });
  }
  return own;
}

std::vector<bool> find_local(const std::vector<ProgramStep>& steps, const std::vector<Accesses>& accesses, size_t count) {
  constexpr size_t kNever = SIZE_MAX;
  std::vector<bool> local(count, true);
  std::vector<size_t> written_in(count, kNever);  // stretch of row-local steps
  size_t stretch = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool is_local = is_row_local(steps[i]);
    if (!is_local) ++stretch;
    for (int id : accesses[i].activations_read) {
      if (!is_local || written_in[size_t(id)] != stretch) local[size_t(id)] = false;
    }
    for (int id : accesses[i].activations_written) {
      written_in[size_t(id)] = stretch;
      if (!is_local) local[size_t(id)] = false;
    }
  }
  return local;
}

}  // namespace

bool is_row_local(const ProgramStep& step) {
  if (std::holds_alternative<LinearStep>(step)) return true;
  const auto* rows = std::get_if<RowStep>(&step);
  return rows != nullptr && std::none_of(rows->ops.begin(), rows->ops.end(),
                                         [](const RowOp& op) { return std::holds_alternative<SelectOp>(op); });
}

ProgramFacts analyse(const std::vector<ProgramStep>& steps, size_t activations) {
  std::vector<Accesses> accesses;
  for (const ProgramStep& step : steps) accesses.push_back(accesses_of(step));
  ProgramFacts facts;
  facts.first_selected = find_first_selected(accesses);
  facts.own_copies = find_own_copies(steps, accesses);
  facts.local = find_local(steps, accesses, activations);
  return facts;
}

}  // namespace topg
