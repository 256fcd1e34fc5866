#include "arrival.h"

#include <algorithm>

namespace nanscan {
namespace {

// A row that went bad, with the ticket that its own device gave it.
struct Ticket {
  uint32_t ticket;
  int row;
  uint32_t batch = 0;  // as in RowContext
};

// Gives the bad rows of all devices one order. Each device counts its own tickets, and within one
// launch for many tensors the blocks end in any order. So rows of one device are in the order of
// their tickets, rows of one scan_many in the order of its list, and devices are merged by the
// order in which the host first visited the rows.
void number_tickets(std::vector<std::vector<Ticket>>& devices, const uint64_t* order, Row* rows) {
  for (auto& tickets : devices) {
    std::sort(tickets.begin(), tickets.end(),
              [](const Ticket& a, const Ticket& b) { return a.ticket < b.ticket; });
    for (auto begin = tickets.begin(); begin != tickets.end();) {
      const auto end = std::find_if(begin, tickets.end(), [&](const Ticket& ticket) {
        return ticket.batch == 0 || ticket.batch != begin->batch;
      });
      std::sort(begin, end,
                [&](const Ticket& a, const Ticket& b) { return order[a.row] < order[b.row]; });
      begin = std::max(end, begin + 1);
    }
    std::reverse(tickets.begin(), tickets.end());  // so that the first can be popped from the end
  }
  for (uint32_t next = 1;; ++next) {
    std::vector<Ticket>* earliest = nullptr;
    for (auto& tickets : devices)
      if (!tickets.empty() &&
          (!earliest || order[tickets.back().row] < order[earliest->back().row]))
        earliest = &tickets;
    if (!earliest) return;
    rows[earliest->back().row].ticket = next;
    earliest->pop_back();
  }
}

}  // namespace

void Arrival::add_row(const RowContext& context) {
  const int row = size();
  descriptions_.push_back(context.description);
  batches_.push_back(context.batch);
  if (!context.earlier.empty()) earlier_[row] = context.earlier;
  if (graphs_) graph_order_.push_back(context.latest_order);
}

bool Arrival::ready() {
  return std::all_of(copies_.begin(), copies_.end(), [](auto& copy) { return copy->ready(); });
}

void Arrival::wait() {
  for (auto& copy : copies_) copy->wait();
}

std::vector<int> Arrival::merge_into(Row* rows, uint64_t* order) {
  std::vector<std::vector<Ticket>> devices(1);  // the host's rows first
  for (int i = 0; i < size(); ++i)
    if (rows[i].ticket != 0) devices[0].push_back({rows[i].ticket, i});
  for (const auto& copy : copies_) {
    devices.emplace_back();
    for (int i = 0; i < size(); ++i) {
      const Row& arrived = copy->rows()[i];
      if (arrived.calls == 0) continue;
      if (order[i] == 0 && graphs_) order[i] = graph_order_[i];
      const bool goes_bad = arrived.ticket != 0 && rows[i].ticket == 0;
      if (goes_bad) devices.back().push_back({arrived.ticket, i, batches_[i]});
      merge_rows(arrived, rows[i]);
      if (goes_bad) describe_bad_call(i, rows[i]);
    }
  }
  number_tickets(devices, order, rows);
  std::vector<int> notable;
  for (int i = 0; i < size(); ++i)
    if (is_notable(rows[i], descriptions_[i].get())) notable.push_back(i);
  copies_.clear();  // later snapshots can use their memory
  return notable;
}

// The description becomes that of the first bad call: the first one that reaches as far as it. If
// the call is not known, nor is the shape that the index is of.
void Arrival::describe_bad_call(int i, Row& row) {
  const auto found = earlier_.find(i);
  if (found == earlier_.end()) return;
  if (row.first_bad_call == 0) {
    row.first_bad = 0;
    return;
  }
  for (const auto& [last_call, description] : found->second)
    if (row.first_bad_call <= last_call) {
      descriptions_[i] = description;
      return;
    }
}

}  // namespace nanscan
