// The row: 128 bytes that say what one or more scans found. All bytes zero means nothing scanned.
//
// Every field merges with +, unsigned max, or "first writer", and 0 is the identity of each, so a
// row is reset by zeroing it. Extremes are over finite values only, as order-preserving unsigned
// keys of the value widened to float64; min_key and first_bad are stored complemented.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanscan {

struct Row {
  uint64_t elements;  // logical elements: a stride-0 dimension multiplies
  uint64_t nan;
  uint64_t posinf;
  uint64_t neginf;
  uint64_t max_key;
  uint64_t min_key;         // ~key of the smallest finite value
  uint64_t first_bad;       // ~(row-major index) of the first non-finite element of that call
  uint32_t calls;           // scans merged into this row
  int32_t pending;          // while a CUDA scan runs: its blocks that are not done; else 0
  uint32_t first_bad_call;  // the call, counted from 1, that first saw something non-finite
  uint32_t ticket;          // order among rows of a device in which they went bad; 0: all finite
  double sum;               // over finite values, only when moments are asked for
  double sumsq;             // likewise
  uint64_t zeros;           // likewise; both signs
  uint64_t subnormals;      // likewise; of the tensor's own format
  // These three only on a CUDA device; 0 in a snapshot.
  uint64_t call_first_bad;  // as first_bad, of the scan that runs
  uint64_t mirror;          // address of a Row in mapped host memory that gets the result; 0: none
  uint64_t arrived;         // in a mirror: 1 once the result is complete
};
constexpr int kResultWords = 13;  // of 8 bytes, up to where the fields for CUDA alone begin
constexpr int kArrivedWord = 15;
static_assert(sizeof(Row) == 128, "kernels, snapshots and nanscan/_row.py share this layout");
#ifndef __CUDACC_RTC__  // which has no offsetof
static_assert(offsetof(Row, first_bad) == 48 && offsetof(Row, calls) == 56 &&
                  offsetof(Row, pending) == 60 && offsetof(Row, sum) == 72 &&
                  offsetof(Row, call_first_bad) == 8 * kResultWords &&
                  offsetof(Row, arrived) == 8 * kArrivedWord,
              "the same, field by field");
#endif

// Order-preserving map of float64 bits to unsigned; 0 for no finite value, nor ~0.
constexpr uint64_t order_key(uint64_t float64_bits) {
  return float64_bits >> 63 ? ~float64_bits : float64_bits | uint64_t{1} << 63;
}

// What one scan of one tensor found, before it joins a row.
struct ScanTotals {
  uint64_t elements = 0;
  uint64_t nan = 0, posinf = 0, neginf = 0;
  uint64_t max_key = 0, min_key = 0;  // as in Row; 0 when there is no finite value
  double sum = 0, sumsq = 0;
  uint64_t zeros = 0, subnormals = 0;

  uint64_t nonfinite() const { return nan + posinf + neginf; }
};

// Merges a scan on the host. Not atomic: on the CPU every merge holds the GIL. When this call is
// the row's first bad one, takes a ticket and asks `first_bad_index()` for the element's index.
template <typename FirstBadIndex>
void merge_into(Row& row, const ScanTotals& t, uint32_t& last_ticket,
                FirstBadIndex first_bad_index) {
  row.calls += 1;
  row.elements += t.elements;
  if (t.max_key > row.max_key) row.max_key = t.max_key;
  if (t.min_key > row.min_key) row.min_key = t.min_key;
  row.sum += t.sum;
  row.sumsq += t.sumsq;
  row.zeros += t.zeros;
  row.subnormals += t.subnormals;
  if (t.nonfinite() == 0) return;
  row.nan += t.nan;
  row.posinf += t.posinf;
  row.neginf += t.neginf;
  if (row.ticket != 0) return;
  if (++last_ticket == 0) ++last_ticket;  // 0 means "none", also after 2^32 bad rows
  row.ticket = last_ticket;
  row.first_bad_call = row.calls;
  row.first_bad = ~first_bad_index();
}

}  // namespace nanscan
