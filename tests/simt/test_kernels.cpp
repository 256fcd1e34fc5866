// The scan kernels against an oracle: formats x layouts x sizes x contents x grids x schedules, one
// launch after another into rows that are compared field by field.
//
//   test_kernels [--small] [--stories N] [--seed S] [--only CASE]
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "oracle.h"
#include "simt.h"
#include "tensors.h"

extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

using nanscan::Row;
using nanscan::cuda::FlatScan;
using nanscan::cuda::IndexDim;
using nanscan::cuda::ManyScan;
using nanscan::cuda::StridedScan;
using namespace oracle;

constexpr uint64_t kThreads = nanscan::cuda::kThreads;
constexpr uint64_t kVectorBytes = nanscan::cuda::kLoadBytes;
constexpr uint64_t kLoads = nanscan::cuda::kLoads;

struct Kernels {
  void (*flat)(FlatScan);
  void (*strided)(StridedScan);
  void (*strided_moments)(StridedScan);
};
constexpr Kernels kKernels[nanscan::kDTypeCount] = {
#define KERNELS_OF(dtype, suffix, ...) \
  {nanscan_flat_##suffix, nanscan_strided_##suffix, nanscan_strided_moments_##suffix},
    NANSCAN_DTYPES(KERNELS_OF)
#undef KERNELS_OF
};

// ---- which case runs, and what failed ----------------------------------------------------------

struct Options {
  bool small = false;
  uint64_t stories = 400, seed = 1, only = 0;
} options;

std::string running;  // the case, for messages
uint64_t cases = 0, launches = 0;
int failures = 0;

void say_what_runs() {
  const std::string text = "while running " + running + "\n";
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

void fail(const std::string& what) {
  fprintf(stderr, "FAIL: %s\n%s\n", running.c_str(), what.c_str());
  if (++failures == 5) {
    fprintf(stderr, "enough\n");
    exit(1);
  }
}

// ---- rows --------------------------------------------------------------------------------------

// A row between two others that nobody may touch, with a mirror or without.
class GuardedRow {
 public:
  explicit GuardedRow(bool mirrored) : rows_(new Row[3]) {
    memset(static_cast<void*>(rows_.get()), kGuard, 3 * sizeof(Row));
    row() = Row{};
    if (!mirrored) return;
    mirror_.reset(new Row);
    reset_mirror();
    row().mirror = reinterpret_cast<uint64_t>(mirror_.get());
  }

  Row& row() { return rows_[1]; }
  ExpectedRow& expected() { return expected_; }

  // At a __threadfence_system(): what the host finds once the result has arrived.
  void at_fence() {
    if (!mirror_ || mirror_->arrived != 0) return;
    complete_at_fence_ |= expected_.differences(*mirror_).empty() && is_empty();
  }

  // After a launch that scanned into this row.
  void check() {
    if (!mirror_) {
      const std::string differences = expected_.differences(row());
      if (!differences.empty()) fail("the row is wrong:" + differences);
    } else {
      const std::string differences = expected_.differences(*mirror_);
      if (!differences.empty()) fail("the mirror is wrong:" + differences);
      if (mirror_->arrived != 1) fail("the mirror has not arrived");
      if (!complete_at_fence_ && !simt::under_tsan())
        fail("no system fence between the result and its arrival");
      if (mirror_->call_first_bad != kUntouched || mirror_->mirror != kUntouched)
        fail("more of the mirror was written than the result");
      if (row().mirror != reinterpret_cast<uint64_t>(mirror_.get()))
        fail("the row has lost its mirror");
      if (!is_empty())
        fail("a row that was mirrored does not begin anew:" + ExpectedRow().differences(row()));
      reset_mirror();
      expected_ = ExpectedRow();
      complete_at_fence_ = false;
    }
    if (row().call_first_bad != 0) fail("call_first_bad is left behind");
    if (row().arrived != 0) fail("arrived is for mirrors");
    for (const Row* guard : {&rows_[0], &rows_[2]})
      for (size_t i = 0; i < sizeof(Row); ++i)
        if (reinterpret_cast<const unsigned char*>(guard)[i] != kGuard)
          return fail("wrote into another row");
  }

  bool mirrored() const { return mirror_ != nullptr; }
  uint32_t ticket() { return mirror_ ? mirror_->ticket : row().ticket; }

 private:
  static constexpr int kGuard = 0xc3;
  static constexpr uint64_t kUntouched = 0x3c3c3c3c3c3c3c3c;

  bool is_empty() {
    Row copy = row();
    copy.mirror = 0;
    const Row empty{};
    return memcmp(&copy, &empty, sizeof copy) == 0;
  }

  void reset_mirror() {
    memset(static_cast<void*>(mirror_.get()), kUntouched & 0xff, sizeof(Row));
    mirror_->arrived = 0;
  }

  std::unique_ptr<Row[]> rows_;
  std::unique_ptr<Row> mirror_;
  ExpectedRow expected_;
  bool complete_at_fence_ = false;
};

// The ticket counter, and what every launch must obey.
class Device {
 public:
  explicit Device(uint32_t last_ticket = 0) : tickets_(new uint32_t(last_ticket)) {}

  uint32_t* tickets() { return tickets_.get(); }

  void launch(unsigned grid, const std::vector<GuardedRow*>& rows,
              const std::function<void()>& kernel) {
    // What each row should take, and in which order several do is open.
    uint32_t next = *tickets_;
    std::vector<uint32_t> to_take;
    std::vector<GuardedRow*> takers;
    for (GuardedRow* row : rows) {
      if (!row->expected().end_scan()) continue;
      if (++next == 0) ++next;
      to_take.push_back(next);
      takers.push_back(row);
      if (rows.size() == 1) row->expected().set_ticket(next);
    }
    if (!simt::under_tsan())
      simt::on_system_fence([&] {  // there it would race with other rows
        for (GuardedRow* row : rows) {
          if (rows.size() > 1) row->expected().set_ticket(row->ticket());
          row->at_fence();
        }
      });
    simt::launch(grid, kThreads, kernel);
    simt::on_system_fence(nullptr);
    ++launches;

    for (GuardedRow* row : takers) {
      const auto found = std::find(to_take.begin(), to_take.end(), row->ticket());
      if (found == to_take.end())
        fail("took ticket " + std::to_string(row->ticket()) + ", which nobody was to take");
      else
        to_take.erase(found);
      row->expected().set_ticket(row->ticket());
    }
    if (*tickets_ != next)
      fail("the last ticket is " + std::to_string(*tickets_) + ", not " + std::to_string(next));
    for (GuardedRow* row : rows) row->check();
  }

 private:
  std::unique_ptr<uint32_t> tickets_;
};

// ---- from tensors to kernel arguments ----------------------------------------------------------

// How a tensor lies in memory, slowest dimension first.
struct Walk {
  Dims dims;                    // the last is the run
  std::vector<IndexDim> index;  // the same dimensions, less coalesced
};

Walk walk_of(const Tensor& tensor) {
  struct Sorted {
    Dim dim;
    uint64_t weight;
  };
  std::vector<Sorted> sorted;
  uint64_t weight = 1;
  for (size_t d = tensor.dims().size(); d-- > 0;) {
    const Dim& dim = tensor.dims()[d];
    if (dim.size > 1 && dim.stride != 0) sorted.insert(sorted.begin(), {dim, weight});
    weight *= dim.size;
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Sorted& a, const Sorted& b) { return a.dim.stride > b.dim.stride; });
  Walk walk;
  for (const Sorted& s : sorted) {
    const auto size = static_cast<int64_t>(s.dim.size);
    if (!walk.dims.empty() && walk.dims.back().stride == s.dim.stride * size)
      walk.dims.back() = {walk.dims.back().size * s.dim.size, s.dim.stride};
    else
      walk.dims.push_back(s.dim);
    if (!walk.index.empty() && walk.index.back().weight == s.weight * s.dim.size)
      walk.index.back() = {walk.index.back().size * s.dim.size, s.weight};
    else
      walk.index.push_back({s.dim.size, s.weight});
  }
  if (walk.dims.empty()) walk.dims.push_back({1, 1});
  if (walk.index.empty() || (walk.index.size() == 1 && walk.index[0].weight == 1))
    walk.index.clear();
  return walk;
}

bool suits_vectors(const Tensor& tensor) {
  const Walk walk = walk_of(tensor);
  const int64_t item = tensor.format().bytes;
  bool suits =
      walk.dims.back().stride == 1 && reinterpret_cast<uint64_t>(tensor.data()) % kVectorBytes == 0;
  for (size_t d = 0; d + 1 < walk.dims.size(); ++d)
    suits &= walk.dims[d].stride * item % static_cast<int64_t>(kVectorBytes) == 0;
  return suits;
}

uint64_t divide_up(uint64_t n, uint64_t by) { return (n + by - 1) / by; }

struct StridedChoice {
  bool vectors;
  uint32_t lanes;  // 0: as many as a run can use
};

StridedScan plan_strided(const Tensor& tensor, StridedChoice choice) {
  const Walk walk = walk_of(tensor);
  StridedScan scan;
  memset(static_cast<void*>(&scan), 0xee, sizeof scan);  // the host leaves the rest as it is, too
  scan.data = tensor.data();
  scan.run = walk.dims.back().size;
  scan.run_stride = walk.dims.back().stride;
  scan.vectors = choice.vectors;
  const uint64_t loads =
      choice.vectors ? divide_up(scan.run * tensor.format().bytes, kVectorBytes) : scan.run;
  scan.lanes = choice.lanes ? choice.lanes : 1;
  if (!choice.lanes)
    while (scan.lanes < 32 && scan.lanes * kLoads < loads) scan.lanes *= 2;
  scan.pieces = divide_up(loads, scan.lanes * kLoads);
  scan.units = scan.pieces;
  scan.outer_count = static_cast<uint32_t>(walk.dims.size() - 1);
  for (uint32_t d = 0; d < scan.outer_count; ++d) {
    scan.outer[d] = {walk.dims[d].size, walk.dims[d].stride};
    scan.units *= walk.dims[d].size;
  }
  scan.index_count = static_cast<uint32_t>(walk.index.size());
  std::copy(walk.index.begin(), walk.index.end(), scan.index);
  scan.repeat = tensor.repeat();
  scan.elements = tensor.elements();
  return scan;
}

// ---- scans -------------------------------------------------------------------------------------

void scan_flat(Device& device, GuardedRow& row, const Tensor& tensor, unsigned grid) {
  tensor.expect(row.expected(), false);
  const FlatScan scan{tensor.data(), tensor.elements(), &row.row(), device.tickets(),
                      row.mirrored()};
  const auto kernel = kKernels[static_cast<int>(tensor.format().dtype)].flat;
  device.launch(grid, {&row}, [&] { kernel(scan); });
}

void scan_strided(Device& device, GuardedRow& row, const Tensor& tensor, unsigned grid,
                  bool moments, StridedChoice choice) {
  tensor.expect(row.expected(), moments);
  StridedScan scan = plan_strided(tensor, choice);
  scan.row = &row.row();
  scan.tickets = device.tickets();
  scan.mirrored = row.mirrored();
  const Kernels& kernels = kKernels[static_cast<int>(tensor.format().dtype)];
  const auto kernel = moments ? kernels.strided_moments : kernels.strided;
  device.launch(grid, {&row}, [&] { kernel(scan); });
}

// Dense tensors, each into its row, with so many blocks each; as many as one launch can take.
void scan_many(Device& device, const std::vector<GuardedRow*>& rows,
               const std::vector<std::unique_ptr<Tensor>>& tensors,
               const std::vector<unsigned>& blocks, bool moments) {
  ManyScan scan;
  memset(static_cast<void*>(&scan), 0xee, sizeof scan);
  scan.tensors = static_cast<uint32_t>(tensors.size());
  scan.blocks = 0;
  scan.mirrored = rows[0]->mirrored();
  scan.tickets = device.tickets();
  size_t dims = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = *tensors[i];
    tensor.expect(rows[i]->expected(), moments);
    const std::vector<IndexDim> index = walk_of(tensor).index;
    scan.entry[i] = {tensor.data(),
                     tensor.elements(),
                     &rows[i]->row(),
                     scan.blocks,
                     tensor.format().dtype,
                     static_cast<uint8_t>(index.size()),
                     static_cast<uint16_t>(dims)};
    std::copy(index.begin(), index.end(), scan.index + dims);
    dims += index.size();
    scan.blocks += blocks[i];
  }
  device.launch(scan.blocks, rows,
                [&] { moments ? nanscan_many_moments(scan) : nanscan_many(scan); });
}

// ---- enumerated cases --------------------------------------------------------------------------

constexpr unsigned kGrids[] = {1, 2, 3, 7, 0};  // 0: what a tensor of this size would get
constexpr int kGridCount = 5;

unsigned natural_grid(uint64_t threads) {
  const uint64_t blocks = divide_up(threads, kThreads);
  return static_cast<unsigned>(std::min<uint64_t>(std::max<uint64_t>(blocks, 1), 9));
}

// Begins a case, unless it is one to leave out: with --small, all but one in so many.
bool begin_case(int one_in, const std::string& what) {
  ++cases;
  if (options.only != 0 && options.only != cases) return false;
  if (options.only == 0 && options.small && Random(cases + options.seed).below(one_in) != 0)
    return false;
  simt::Config config;
  config.schedule = static_cast<simt::Schedule>(cases % 4);
  config.seed = options.seed * 1000003 + cases;
  config.resident_blocks = 1 + cases / 4 % 3;
  config.atomic_yield = cases % 3 == 0 ? 2 : 5;
  config.os_threads = simt::under_tsan() ? 2 : 1;
  simt::configure(config);
  running = "case " + std::to_string(cases) + ": " + what;
  return true;
}

// Sizes at the borders of vectors, rounds and blocks, in elements; with what lies around them.
std::vector<uint64_t> border_sizes(uint64_t bytes) {
  const uint64_t vector = kVectorBytes / bytes, round = kThreads * vector, tile = kLoads * round;
  std::vector<uint64_t> sizes = {1,
                                 2,
                                 vector,
                                 vector + 1,
                                 3 * vector - 1,
                                 255,
                                 256,
                                 257,
                                 round - 1,
                                 round,
                                 round + 1,
                                 tile - 1,
                                 tile,
                                 tile + 1,
                                 tile + round + 3,
                                 2 * tile,
                                 31,
                                 3 * tile + 5 * vector + 1};
  if (vector > 2) sizes.insert(sizes.end(), {vector - 1, 2 * vector + 1});
  return sizes;
}

void one_flat(const Format& format, uint64_t n, uint64_t skew, Contents contents, unsigned grid) {
  const std::string what = std::string(kContentsName[static_cast<int>(contents)]) + ", " +
                           std::to_string(n) + " x " + format.name + ", skew " +
                           std::to_string(skew) + ", grid " + std::to_string(grid);
  if (!begin_case(29, "flat " + what)) return;
  Random random(cases);
  Tensor tensor(format, flat(n), skew);
  tensor.fill(contents, random);
  Device device(static_cast<uint32_t>(random.below(5)));
  GuardedRow row(cases % 5 == 0);
  if (grid == 0) grid = natural_grid(n * format.bytes / kVectorBytes);
  scan_flat(device, row, tensor, grid);
}

void test_flat_sizes_and_contents() {
  int turn = 0;
  for (const Format& format : kFormats)
    for (const uint64_t n : border_sizes(format.bytes))
      for (int contents = 0; contents < kContents; ++contents)
        one_flat(format, n, 0, static_cast<Contents>(contents), kGrids[turn++ % kGridCount]);
}

void test_flat_alignments() {
  int turn = 0;
  for (const Format& format : kFormats)
    for (uint64_t skew = 1; skew < kVectorBytes / format.bytes; ++skew)
      for (const uint64_t n : border_sizes(format.bytes)) {
        if (n > 3000 && (turn + skew) % 3 != 0) {
          ++turn;
          continue;
        }
        one_flat(format, n, skew, static_cast<Contents>(turn % kContents),
                 kGrids[turn / 3 % kGridCount]);
        ++turn;
      }
}

std::vector<std::pair<const char*, Dims>> layouts(uint64_t vector) {
  const int64_t v = static_cast<int64_t>(vector);
  return {
      {"a column", {{501, 3}}},
      {"a scalar", {}},
      {"rows of a matrix", permuted({19, 37}, {0, 1}, 5)},
      {"rows that begin aligned", permuted({13, 5 * vector}, {0, 1}, 3 * v)},
      {"rows that begin aligned and end in the midst",
       permuted({13, 5 * vector + 1}, {0, 1}, v - 1)},
      {"long aligned rows", permuted({3, 140 * vector}, {0, 1}, v)},
      {"long aligned rows, odd", permuted({3, 128 * vector + 3 % vector}, {0, 1}, 2 * v - 3 % v)},
      {"many short rows", permuted({900, 2}, {0, 1}, 1)},
      {"rows of one vector", permuted({300, vector}, {0, 1}, v)},
      {"a transposed matrix", permuted({45, 61}, {1, 0})},
      {"a transposed matrix with gaps", permuted({45, 61}, {1, 0}, 3)},
      {"channels last", permuted({3, 5, 7, 11}, {0, 2, 3, 1})},
      {"channels last, cropped", permuted({3, 5, 7, 11}, {0, 2, 3, 1}, 16)},
      {"three dimensions, turned", permuted({9, 10, 11}, {2, 0, 1})},
      {"three dimensions, spread", permuted({9, 10, 11}, {1, 0, 2}, 4, 2)},
      {"seven dimensions", permuted({2, 3, 2, 3, 2, 3, 4}, {3, 1, 5, 0, 2, 4, 6}, 2)},
      {"expanded in front", {{5, 0}, {400, 1}}},
      {"expanded behind", {{400, 1}, {5, 0}}},
      {"expanded in the midst", {{20, 30}, {7, 0}, {30, 1}}},
      {"expanded and turned", {{30, 1}, {3, 0}, {20, 30}, {2, 0}}},
      {"one element, expanded", {{1000, 0}, {3, 0}}},
      {"expanded past 2^32", {{uint64_t{1} << 34, 0}, {300, 2}, {1 << 20, 0}}},
      {"windows that overlap", {{200, 2}, {5, 1}}},
      {"flat", flat(2000)},
      {"dimensions of size 1", {{1, 77}, {40, 6}, {1, 0}, {6, 1}, {1, 5}}},
  };
}

void test_strided() {
  int turn = 0;
  for (const Format& format : kFormats)
    for (const auto& [name, dims] : layouts(kVectorBytes / format.bytes))
      for (int c = 0; c < 6; ++c) {
        const auto contents = static_cast<Contents>((turn * 7 + c) % kContents);
        ++turn;
        const bool moments = (turn + c) % 2 == 0;
        unsigned grid = kGrids[turn % kGridCount];
        const uint64_t vector = kVectorBytes / format.bytes;
        const uint64_t skew = c < 3 ? 0 : turn % vector;
        if (!begin_case(5, std::string(name) + ", " + format.name + ", " +
                               kContentsName[static_cast<int>(contents)] +
                               (moments ? ", moments" : "") + ", grid " + std::to_string(grid)))
          continue;
        Random random(cases);
        Tensor tensor(format, dims, skew);
        tensor.fill(contents, random);
        Device device;
        GuardedRow row(turn % 4 == 0);
        const uint32_t lanes = c % 3 == 1 ? 1u << random.below(6) : 0;
        const StridedChoice choice{suits_vectors(tensor) && c % 3 != 2, lanes};
        const StridedScan plan = plan_strided(tensor, choice);
        if (grid == 0) grid = natural_grid(plan.units * plan.lanes);
        scan_strided(device, row, tensor, grid, moments, choice);
      }
}

// Each bad value in each place of a small tensor: vectors, head, tail, runs.
void test_every_place() {
  for (const Format& format : kFormats) {
    const uint64_t vector = kVectorBytes / format.bytes;
    for (uint64_t place = 0; place < 5 * vector + 3; ++place)
      for (int kind = 0; kind < 3; ++kind) {
        if (!begin_case(29, "bad value " + std::to_string(kind) + " at " + std::to_string(place) +
                                ", " + format.name))
          continue;
        Random random(cases);
        Tensor tensor(format, flat(5 * vector + 3), place % vector);
        tensor.fill(Contents::kFinite, random);
        tensor.set_bad(place, kind, random);
        Device device;
        GuardedRow row(false);
        scan_flat(device, row, tensor, 1);
        Tensor rows(format, permuted({3, 2 * vector + 1}, {0, 1}, vector - 1));
        rows.fill(Contents::kFinite, random);
        rows.set_bad(place % (6 * vector + 3), kind, random);
        GuardedRow second(false);
        scan_strided(device, second, rows, 2, place % 2, {true, 0});
      }
  }
}

// All pairs of bytes, each byte above the other and below it: packed min and max take two at a
// time.
void test_every_pair_of_bytes() {
  for (const Format& format : kFormats) {
    if (format.bytes != 1) continue;
    if (!begin_case(1, "every pair of bytes, " + std::string(format.name))) continue;
    for (int a = 0; a < 256; ++a)
      for (int b = 0; b < 256; ++b) {
        alignas(kVectorBytes) uint8_t vector[kVectorBytes];
        ExpectedRow expected;
        for (uint64_t i = 0; i < kVectorBytes; ++i) {
          vector[i] = static_cast<uint8_t>(i % 2 == i / 8 ? a : b);
          expected.element(decode(format, vector[i]), i, 1, false);
        }
        if (expected.end_scan()) expected.set_ticket(1);
        const std::string differences =
            expected.differences(simt_test::scan_vector(format.dtype, vector));
        if (!differences.empty())
          fail("bytes " + std::to_string(a) + " and " + std::to_string(b) + ":" + differences);
      }
  }
}

void test_calls_into_one_row() {
  for (const Format& format : kFormats)
    for (int bad_call = 0; bad_call < 4; ++bad_call)
      for (const uint32_t last_ticket : {0u, 6u, 0xfffffffeu, 0xffffffffu}) {
        if (!begin_case(5, "four calls into one row, " + std::string(format.name) +
                               ", bad from call " + std::to_string(bad_call) +
                               " on, after ticket " + std::to_string(last_ticket)))
          continue;
        Random random(cases);
        Device device(last_ticket);
        GuardedRow row(false), other(false);
        for (int call = 0; call < 4; ++call) {
          Tensor tensor(format, flat(700 + 300 * call));
          tensor.fill(call < bad_call ? Contents::kFinite : Contents::kSomeBad, random);
          scan_flat(device, row, tensor, 1 + (call + bad_call) % 3);
          if (call == 1) scan_flat(device, other, tensor, 2);
        }
      }
}

std::unique_ptr<Tensor> random_tensor(Random& random, Dims dims) {
  const Format& format = kFormats[random.below(nanscan::kDTypeCount)];
  const uint64_t skew = random.one_in(2) ? 0 : random.below(kVectorBytes / format.bytes);
  auto tensor = std::make_unique<Tensor>(format, std::move(dims), skew);
  const bool clean = random.one_in(3);
  tensor->fill(clean ? Contents::kNarrow : static_cast<Contents>(random.below(kContents)), random);
  return tensor;
}

Dims random_dense(Random& random, uint64_t most) {
  if (random.one_in(2)) return flat(random.between(1, most));
  std::vector<uint64_t> sizes(random.between(2, 4));
  uint64_t left = most;
  for (uint64_t& size : sizes)
    left = std::max<uint64_t>(left / (size = random.between(1, std::min<uint64_t>(left, 30))), 1);
  std::vector<size_t> order(sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937_64(random.bits()));
  return permuted(sizes, order);
}

void many(Random& random, Device& device, size_t count, uint64_t most_elements,
          unsigned most_blocks, bool moments) {
  std::vector<std::unique_ptr<GuardedRow>> owned;
  std::vector<GuardedRow*> rows;
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<unsigned> blocks;
  const bool mirrored = random.one_in(3);
  size_t dims = 0;
  for (size_t i = 0; i < count; ++i) {
    tensors.push_back(random_tensor(random, random_dense(random, most_elements)));
    const size_t index_dims = walk_of(*tensors[i]).index.size();
    if (dims + index_dims > nanscan::cuda::kManyDims)
      tensors[i] = random_tensor(random, flat(random.between(1, most_elements)));
    else
      dims += index_dims;
    owned.push_back(std::make_unique<GuardedRow>(mirrored));
    rows.push_back(owned.back().get());
    blocks.push_back(static_cast<unsigned>(random.between(1, most_blocks)));
  }
  scan_many(device, rows, tensors, blocks, moments);
}

void test_many() {
  for (const size_t count : {1, 2, 3, 5, 8, 17, 40, 95, nanscan::cuda::kManyTensors})
    for (int turn = 0; turn < 6; ++turn) {
      if (!begin_case(count > 17 ? 9 : 2,
                      std::to_string(count) + " tensors in a launch, turn " + std::to_string(turn)))
        continue;
      Random random(cases);
      Device device(static_cast<uint32_t>(random.below(3)) - 2);
      many(random, device, count, count > 17 ? 300 : 6000, count > 17 ? 2 : 4, turn % 2);
    }
}

// ---- two streams into one row ------------------------------------------------------------------

// Two scans at a time into a row race for its ticket, by design; their counts must not suffer.
void test_two_streams() {
  if (simt::under_tsan()) return;
  for (const unsigned blocks : {1, 2, 5})
    for (int turn = 0; turn < 12; ++turn) {
      if (!begin_case(3, "two streams, " + std::to_string(blocks) + " blocks each, turn " +
                             std::to_string(turn)))
        continue;
      Random random(cases);
      Tensor a(kFormats[2], flat(3000)), b(kFormats[2], flat(5000));
      a.fill(turn % 2 ? Contents::kNarrow : Contents::kSomeBad, random);
      b.fill(turn % 3 ? Contents::kNarrow : Contents::kSomeBad, random);
      uint32_t tickets = 0;
      GuardedRow guarded(false);
      Row& row = guarded.row();
      const FlatScan scans[] = {{a.data(), a.elements(), &row, &tickets, false},
                                {b.data(), b.elements(), &row, &tickets, false}};
      simt::launch(2 * blocks, kThreads, [&] {
        simt_test::flat_float32(scans[blockIdx.x / blocks], blockIdx.x % blocks, blocks);
      });
      ++launches;
      ExpectedRow& expected = guarded.expected();
      a.expect(expected, false);
      expected.end_scan();
      b.expect(expected, false);
      expected.end_scan();
      if (row.calls != 2 || row.pending != 0) fail("calls or blocks were lost");
      if ((row.ticket != 0) != (turn % 2 == 0 || turn % 3 == 0)) fail("a ticket too many or few");
      expected.forget_first_bad(row);  // of either scan
      guarded.check();
    }
}

// Calls one after another on each of several streams, all into one row, with the blocks of a call
// in any order: the number of the first bad call must be one that a bad call can have had. In every
// other turn only one block runs at a time, so that a stream can be far ahead of another.
void test_streams_of_calls() {
  if (simt::under_tsan()) return;
  struct Call {
    Tensor tensor;
    bool bad;
    unsigned blocks;
  };
  struct Step {
    const Call* call;
    unsigned block;
  };
  for (const unsigned streams : {1, 2, 3})
    for (int turn = 0; turn < 400; ++turn) {
      if (!begin_case(3,
                      std::to_string(streams) + " streams of calls, turn " + std::to_string(turn)))
        continue;
      Random random(cases);
      std::vector<std::vector<Call>> calls(streams);
      std::vector<std::vector<Step>> steps(streams);
      uint32_t count = 0;
      for (unsigned stream = 0; stream < streams; ++stream) {
        const uint64_t length = random.between(1, 4);
        calls[stream].reserve(length);  // steps point there
        for (uint64_t i = 0; i < length; ++i, ++count) {
          const uint64_t elements = random.between(1, 3000);
          calls[stream].push_back({Tensor(kFormats[2], flat(elements)), random.one_in(3),
                                   static_cast<unsigned>(random.between(1, 3))});
          Call& call = calls[stream].back();
          call.tensor.fill(Contents::kNarrow, random);
          if (call.bad) call.tensor.set_bad(random.below(elements), 0, random);
          for (unsigned block = 0; block < call.blocks; ++block)
            steps[stream].push_back({&call, block});
          std::shuffle(steps[stream].end() - call.blocks, steps[stream].end(),
                       std::mt19937_64(random.bits()));
        }
      }
      if (turn % 2) {
        std::vector<unsigned> of;  // whose turn it is
        for (unsigned stream = 0; stream < streams; ++stream)
          of.insert(of.end(), steps[stream].size(), stream);
        std::shuffle(of.begin(), of.end(), std::mt19937_64(random.bits()));
        std::vector<size_t> next(streams);
        std::vector<Step> merged;
        for (const unsigned stream : of) merged.push_back(steps[stream][next[stream]++]);
        steps = {merged};
      }
      uint32_t tickets = 0;
      GuardedRow guarded(false);
      Row& row = guarded.row();
      simt::launch(static_cast<unsigned>(steps.size()), kThreads, [&] {
        for (const Step& step : steps[blockIdx.x]) {
          const Tensor& tensor = step.call->tensor;
          simt_test::flat_float32({tensor.data(), tensor.elements(), &row, &tickets, false},
                                  step.block, step.call->blocks);
          __syncthreads();  // shared memory is used again
        }
      });
      ++launches;
      bool bad = false, possible = streams > 1 && row.first_bad_call == 0;
      for (const auto& stream : calls)
        for (size_t i = 0; i < stream.size(); ++i) {
          stream[i].tensor.expect(guarded.expected(), false);
          guarded.expected().end_scan();
          if (!stream[i].bad) continue;
          possible |=
              row.first_bad_call > i && row.first_bad_call <= count - (stream.size() - 1 - i);
          bad = true;
        }
      if ((row.ticket != 0) != bad) fail("a ticket too many or few");
      if (bad && !possible)
        fail("no bad call can have had the number " + std::to_string(row.first_bad_call));
      if (streams > 1) guarded.expected().forget_first_bad(row);
      if (streams == 1 && bad) guarded.expected().set_ticket(1);
      guarded.check();
    }
}

// A scan of two blocks is held where it has counted out its last block and not yet closed its call;
// blocks of other scans run meanwhile. The numbers of the calls are known, so only one is right.
void test_calls_that_begin_while_one_closes() {
  if (simt::under_tsan()) return;
  struct Step {
    unsigned call, block;
  };
  struct Story {
    const char* name;
    unsigned bad;                        // call
    std::vector<Step> meanwhile, after;  // call 0 is the one that is held
    uint32_t calls, first_bad_call;
  };
  const Story stories[] = {
      {"a bad call after two that overlap", 2, {{1, 0}, {1, 1}}, {{2, 0}, {2, 1}}, 3, 3},
      {"two calls that overlap after two others",
       2,
       {{1, 0}, {1, 1}},
       {{2, 0}, {3, 0}, {2, 1}, {3, 1}},
       4,
       0},
      {"a bad call begins", 1, {{1, 0}}, {{1, 1}}, 2, 0},
  };
  for (const Story& story : stories) {
    if (!begin_case(1, std::string("while a call closes: ") + story.name)) continue;
    simt::Config config;
    config.seed = cases;
    simt::configure(config);
    Random random(cases);
    Tensor good(kFormats[2], flat(3000)), bad(kFormats[2], flat(3000));
    good.fill(Contents::kNarrow, random);
    bad.fill(Contents::kNarrow, random);
    bad.set_bad(7, 0, random);  // block 0 takes it
    uint32_t tickets = 0;
    GuardedRow guarded(false);
    Row& row = guarded.row();
    const auto run = [&](const Step& step) {
      const Tensor& tensor = step.call == story.bad ? bad : good;
      simt_test::flat_float32({tensor.data(), tensor.elements(), &row, &tickets, false}, step.block,
                              2);
      __syncthreads();  // shared memory is used again
    };
    bool held = false, go_on = false;
    simt::on_fence([&] {  // a finite scan has one fence: the last block's, when it has counted out
      if (blockIdx.x != 0 || held) return;
      held = true;
      simt::wait_until([&] { return go_on; });
    });
    simt::launch(2, kThreads, [&] {
      if (blockIdx.x == 0) {
        run({0, 0});
        run({0, 1});
        for (const Step& step : story.after) run(step);
      } else {
        simt::wait_until([&] { return held; });
        for (const Step& step : story.meanwhile) run(step);
        go_on = true;
      }
    });
    simt::on_fence(nullptr);
    ++launches;
    for (uint32_t call = 0; call < story.calls; ++call) {
      (call == story.bad ? bad : good).expect(guarded.expected(), false);
      guarded.expected().end_scan();
    }
    guarded.expected().set_ticket(1);
    if (row.first_bad_call != story.first_bad_call)
      fail("the first bad call is " + std::to_string(row.first_bad_call) + ", not " +
           std::to_string(story.first_bad_call));
    guarded.expected().forget_first_bad(row);
    guarded.check();
  }
}

// Zeros but for the last: it takes no memory, and a few seconds.
void test_more_than_2_32_elements() {
  if (simt::under_asan() || simt::under_tsan()) return;
  if (!begin_case(1, "2^32 + 5000 elements")) return;
  const uint64_t n = (uint64_t{1} << 32) + 5000;
  void* data =
      mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return fail("no address space");
  static_cast<uint8_t*>(data)[n - 1] = 0x7f;
  uint32_t tickets = 0;
  Row row{};
  const FlatScan scan{data, n, &row, &tickets, false};
  simt::launch(8, kThreads, [&] { nanscan_flat_float8_e4m3fn(scan); });
  munmap(data, n);
  if (row.elements != n || row.nan != 1 || ~row.first_bad != n - 1 || row.ticket != 1)
    fail("the row is wrong");
}

// ---- random stories ----------------------------------------------------------------------------

// A few launches, of all kinds, into a few rows.
void story(uint64_t seed) {
  Random random(seed);
  Device device(static_cast<uint32_t>(random.below(4)) - 2);
  std::vector<std::unique_ptr<GuardedRow>> rows;
  for (uint64_t n = random.between(1, 3); n > 0; --n)
    rows.push_back(std::make_unique<GuardedRow>(random.one_in(3)));
  const uint64_t most = options.small ? 3000 : random.one_in(6) ? 60000 : 6000;
  const std::string name = running;
  for (uint64_t n = random.between(1, 4); n > 0; --n) {
    const bool moments = random.one_in(2);
    if (random.one_in(6)) {
      running = name + ", many tensors";
      many(random, device, random.between(1, 12), most / 8, options.small ? 2 : 4, moments);
      continue;
    }
    GuardedRow& row = *random.of(rows);
    const auto tensor = random_tensor(random, random_layout(random, most));
    const auto grid = static_cast<unsigned>(random.one_in(4) ? 1 : random.between(1, 6));
    running = name + ", " + tensor->describe() + (moments ? ", moments" : "") + ", grid " +
              std::to_string(grid) + (row.mirrored() ? ", mirrored" : "");
    if (!moments && tensor->is_row_major()) {
      scan_flat(device, row, *tensor, grid);
    } else {
      const uint32_t lanes = random.one_in(2) ? 0 : 1u << random.below(6);
      scan_strided(device, row, *tensor, grid, moments,
                   {suits_vectors(*tensor) && !random.one_in(4), lanes});
    }
  }
}

void test_stories() {
  for (uint64_t i = 0; i < options.stories; ++i) {
    const uint64_t seed = options.seed * 1000000 + i;
    if (begin_case(1, "story " + std::to_string(seed))) story(seed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto number = [&] { return ++i < argc ? strtoull(argv[i], nullptr, 0) : 0; };
    if (argument == "--small")
      options.small = true;
    else if (argument == "--stories")
      options.stories = number();
    else if (argument == "--seed")
      options.seed = number();
    else if (argument == "--only")
      options.only = number();
    else
      return fprintf(stderr, "unknown argument %s\n", argv[i]), 2;
  }
  simt::on_death(say_what_runs);
  if (!simt::under_asan() && !simt::under_tsan())  // they have their own ways
    signal(SIGSEGV, [](int) {
      say_what_runs();
      _exit(1);
    });
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(say_what_runs);

  test_flat_sizes_and_contents();
  test_flat_alignments();
  test_strided();
  test_every_place();
  test_every_pair_of_bytes();
  test_calls_into_one_row();
  test_many();
  test_two_streams();
  test_streams_of_calls();
  test_calls_that_begin_while_one_closes();
  test_more_than_2_32_elements();
  test_stories();
  printf("test_kernels, seed %llu, packed min and max %d: %llu cases, %llu launches, %d failures\n",
         static_cast<unsigned long long>(options.seed), simt_test::kPackedMinMax,
         static_cast<unsigned long long>(cases), static_cast<unsigned long long>(launches),
         failures);
  return failures != 0;
}
