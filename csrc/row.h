// The row: 128 bytes with the result of one or more scans. All bytes zero means: nothing scanned.
//
// NANSCAN_ROW_FIELDS is the one list of its fields, with how each one merges. Zero changes nothing
// in any merge, so a row is reset by zeroing it. Extremes are over finite values only, as keys:
// unsigned integers in the order of the values, widened to float64. min_key and first_bad are
// stored complemented, so that they merge with max as well.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanscan {

// How a field of two rows becomes one.
enum class Merge : uint8_t {
  kAdd,
  kMax,
  kFirstBad,  // taken from the row that went bad first
  kNone,      // state of a scan that is running on a CUDA device; 0 in a snapshot
};

// X(type, name, Merge), in the order of memory.
//   elements        logical elements: a stride-0 dimension multiplies
//   min_key         ~key of the smallest finite value
//   first_bad       ~(row-major index) of the first non-finite element of the first bad call
//   calls           scans merged into this row
//   pending         while a CUDA scan runs: not 0 (scan_kernels.cuh)
//   first_bad_call  the call, counted from 1, that first saw something non-finite; 0 if several
//                   scans ran into the row at that time on a CUDA device: they have no order
//   ticket          the order in which the rows of a device went bad; 0: all values finite
//   sum .. subnormals   over finite values, only when moments are asked for; zeros of both signs,
//                   subnormals of the tensor's own dtype
//   call_first_bad  as first_bad, of the scan that is running
//   mirror          address of a Row in mapped host memory that gets the result; 0: none
//   arrived         in a mirror: 1 once the result is complete
#define NANSCAN_ROW_FIELDS(X)            \
  X(uint64_t, elements, kAdd)            \
  X(uint64_t, nan, kAdd)                 \
  X(uint64_t, posinf, kAdd)              \
  X(uint64_t, neginf, kAdd)              \
  X(uint64_t, max_key, kMax)             \
  X(uint64_t, min_key, kMax)             \
  X(uint64_t, first_bad, kFirstBad)      \
  X(uint32_t, calls, kAdd)               \
  X(int32_t, pending, kNone)             \
  X(uint32_t, first_bad_call, kFirstBad) \
  X(uint32_t, ticket, kFirstBad)         \
  X(double, sum, kAdd)                   \
  X(double, sumsq, kAdd)                 \
  X(uint64_t, zeros, kAdd)               \
  X(uint64_t, subnormals, kAdd)          \
  X(uint64_t, call_first_bad, kNone)     \
  X(uint64_t, mirror, kNone)             \
  X(uint64_t, arrived, kNone)

struct Row {
#define NANSCAN_MEMBER(type, name, merge) type name;
  NANSCAN_ROW_FIELDS(NANSCAN_MEMBER)
#undef NANSCAN_MEMBER
};
constexpr int kResultWords = 13;  // of 8 bytes, before the fields that only CUDA devices use
constexpr int kArrivedWord = 15;
static_assert(sizeof(Row) == 128, "a row is two cache lines, and no field is padded");
#ifndef __CUDACC_RTC__  // NVRTC has no offsetof
static_assert(offsetof(Row, call_first_bad) == 8 * kResultWords &&
                  offsetof(Row, arrived) == 8 * kArrivedWord,
              "the CUDA kernels copy rows by words");
static_assert(offsetof(Row, calls) % 8 == 0 && offsetof(Row, pending) == offsetof(Row, calls) + 4,
              "the CUDA kernels count calls and pending in one word");
#endif

// The key of a float64, given as its bits. No finite value has the key 0 or ~0.
constexpr uint64_t order_key(uint64_t float64_bits) {
  return float64_bits >> 63 ? ~float64_bits : float64_bits | uint64_t{1} << 63;
}

template <Merge merge, typename T>
constexpr void merge_field(const T& from, T& into, bool into_is_bad) {
  if constexpr (merge == Merge::kAdd) into += from;
  if constexpr (merge == Merge::kMax) into = from > into ? from : into;
  if constexpr (merge == Merge::kFirstBad) into = into_is_bad ? into : from;
}

// Merges one row into another. Not atomic.
constexpr void merge_rows(const Row& from, Row& into) {
  const bool into_is_bad = into.ticket != 0;
#define NANSCAN_MERGE(type, name, merge) \
  merge_field<Merge::merge>(from.name, into.name, into_is_bad);
  NANSCAN_ROW_FIELDS(NANSCAN_MERGE)
#undef NANSCAN_MERGE
}

// Merges one scan of one tensor on the host. `scan` has its counts, extremes and moments; the other
// fields are set here. If this call is the row's first bad one, it takes a ticket and asks
// `first_bad_index()` for the element's index. Not atomic: the caller holds the GIL.
template <typename FirstBadIndex>
void merge_scan(Row scan, Row& row, uint32_t& last_ticket, FirstBadIndex first_bad_index) {
  scan.calls = 1;
  if (scan.nan + scan.posinf + scan.neginf > 0 && row.ticket == 0) {
    if (++last_ticket == 0) ++last_ticket;  // 0 means "none", also after 2^32 bad rows
    scan.ticket = last_ticket;
    scan.first_bad_call = row.calls + 1;
    scan.first_bad = ~first_bad_index();
  }
  merge_rows(scan, row);
}

}  // namespace nanscan
