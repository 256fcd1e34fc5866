#include "scan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "block_scan.h"
#include "threads.h"

namespace nanscan::cpu {

#if defined(__x86_64__)
extern const Variant kVariant_sse2, kVariant_avx2, kVariant_avx512;
#elif defined(__aarch64__)
extern const Variant kVariant_neon;
#else
extern const Variant kVariant_generic;
#endif

namespace {

constexpr int64_t kGrainBytes = 64 << 10;  // the least work given to a thread
constexpr size_t kStage = 4096;  // bytes of the buffer, in L1, that collects scattered elements

std::vector<const Variant*> usable_variants() {
#if defined(__x86_64__)
  std::vector<const Variant*> usable = {&kVariant_sse2};
  if (__builtin_cpu_supports("avx2")) usable.push_back(&kVariant_avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    usable.push_back(&kVariant_avx512);
  return usable;
#elif defined(__aarch64__)
  return {&kVariant_neon};
#else
  return {&kVariant_generic};
#endif
}

const Variant*& selected() {
  static const Variant* variant = usable_variants().back();
  return variant;
}

template <typename Int>
void gather(const char* from, int64_t stride, size_t n, char* to) {
  for (size_t i = 0; i < n; ++i)
    std::memcpy(to + i * sizeof(Int), from + static_cast<int64_t>(i) * stride * sizeof(Int),
                sizeof(Int));
}

void gather(const char* from, int64_t stride, size_t n, int item, char* to) {
  if (stride == 1) {
    std::memcpy(to, from, n * item);
  } else if (item == 1) {
    gather<uint8_t>(from, stride, n, to);
  } else if (item == 2) {
    gather<uint16_t>(from, stride, n, to);
  } else if (item == 4) {
    gather<uint32_t>(from, stride, n, to);
  } else {
    gather<uint64_t>(from, stride, n, to);
  }
}

// One scan of one tensor; its threads share it.
struct Job {
  const TensorView& view;
  const MemoryLayout& layout;
  BlockScan scan;
  int item;
  std::mutex mutex;
  BlockTotals totals{};

  // Elements [begin, end) of the walk order.
  BlockTotals range(int64_t begin, int64_t end) const {
    BlockTotals t{};
    if (layout.outer.count == 0 && layout.run_stride == 1)
      scan(view.data + begin * item, static_cast<size_t>(end - begin), &t);
    else
      strided(begin, end, t);
    return t;
  }

  // Long flat runs are scanned in place. Anything else is first copied into a buffer in L1, so that
  // one kernel serves every layout.
  void strided(int64_t begin, int64_t end, BlockTotals& t) const {
    const Dims& outer = layout.outer;
    int64_t position[kMaxDims];
    int64_t rest = begin / layout.run;
    int64_t within = begin % layout.run;
    int64_t offset = 0;
    for (int d = outer.count - 1; d >= 0; --d) {
      position[d] = rest % outer.size[d];
      rest /= outer.size[d];
      offset += position[d] * outer.stride[d];
    }
    alignas(64) char stage[kStage];
    const int64_t capacity = static_cast<int64_t>(kStage) / item;
    const bool in_place = layout.run_stride == 1 && layout.run >= capacity / 4;
    int64_t staged = 0;
    for (int64_t i = begin; i < end;) {
      int64_t n = std::min(end - i, layout.run - within);
      const char* from = view.data + (offset + within * layout.run_stride) * item;
      if (in_place) {
        scan(from, static_cast<size_t>(n), &t);
      } else {
        n = std::min(n, capacity - staged);
        gather(from, layout.run_stride, static_cast<size_t>(n), item, stage + staged * item);
        staged += n;
        if (staged == capacity) {
          scan(stage, static_cast<size_t>(staged), &t);
          staged = 0;
        }
      }
      i += n;
      within += n;
      if (within < layout.run) continue;
      within = 0;
      for (int d = outer.count - 1; d >= 0; --d) {
        offset += outer.stride[d];
        if (++position[d] < outer.size[d]) break;
        offset -= position[d] * outer.stride[d];
        position[d] = 0;
      }
    }
    if (staged > 0) scan(stage, static_cast<size_t>(staged), &t);
  }

  void merge(const BlockTotals& t) {
    std::lock_guard<std::mutex> lock(mutex);
    totals.nan += t.nan;
    totals.posinf += t.posinf;
    totals.neginf += t.neginf;
    totals.sum += t.sum;
    totals.sumsq += t.sumsq;
    totals.zeros += t.zeros;
    totals.subnormals += t.subnormals;
    if (!t.has_finite) return;
    totals.max_key = totals.has_finite ? std::max(totals.max_key, t.max_key) : t.max_key;
    totals.min_key = totals.has_finite ? std::min(totals.min_key, t.min_key) : t.min_key;
    totals.has_finite = 1;
  }

  static void run(int64_t begin, int64_t end, void* self) {
    Job& job = *static_cast<Job*>(self);
    job.merge(job.range(begin, end));
  }
};

// Index of the first non-finite element of a run, or n. In flat runs, clean blocks are skipped at
// the speed of a scan.
template <typename Format>
int64_t search_run(const char* p, int64_t n, int64_t stride, BlockScan scan) {
  using Int = typename Format::Int;
  constexpr int64_t kBlock = 16384 / sizeof(Int);
  int64_t i = 0;
  for (; stride == 1 && n - i >= kBlock; i += kBlock) {
    BlockTotals t{};
    scan(p + i * sizeof(Int), kBlock, &t);
    if (t.nan + t.posinf + t.neginf > 0) break;
  }
  for (; i < n; ++i) {
    Int bits;
    std::memcpy(&bits, p + i * stride * static_cast<int64_t>(sizeof bits), sizeof bits);
    if (!Format::is_finite_key(Format::key(bits))) return i;
  }
  return n;
}

// Searches in row-major order. Stride-0 dimensions stay at index 0: their other elements are the
// same memory.
template <typename Format>
uint64_t search(const TensorView& view, BlockScan scan) {
  constexpr int64_t kItem = sizeof(typename Format::Int);
  const Dims& dims = view.logical;
  const int inner = dims.count - 1;
  const int64_t run = inner < 0 || dims.stride[inner] == 0 ? 1 : dims.size[inner];
  const int64_t run_stride = inner < 0 ? 1 : dims.stride[inner];
  uint64_t weight[kMaxDims];  // row-major index step of each dimension
  uint64_t product = 1;
  for (int d = inner; d >= 0; --d) {
    weight[d] = product;
    product *= static_cast<uint64_t>(dims.size[d]);
  }
  int64_t position[kMaxDims] = {};
  int64_t offset = 0;
  uint64_t index = 0;
  for (;;) {
    const int64_t i = search_run<Format>(view.data + offset * kItem, run, run_stride, scan);
    if (i < run) return index + static_cast<uint64_t>(i);
    int d = inner - 1;
    for (; d >= 0; --d) {
      if (dims.stride[d] == 0) continue;
      offset += dims.stride[d];
      index += weight[d];
      if (++position[d] < dims.size[d]) break;
      offset -= position[d] * dims.stride[d];
      index -= static_cast<uint64_t>(position[d]) * weight[d];
      position[d] = 0;
    }
    if (d < 0) return view.elements;
  }
}

}  // namespace

Row scan(const TensorView& view, bool moments) {
  Row result{};
  result.elements = view.elements;
  if (view.elements == 0) return result;
  MemoryLayout layout;
  plan_layout(view, layout);
  const Variant& variant = *selected();
  const int dtype = static_cast<int>(view.dtype);
  const int item = item_size(view.dtype);
  const BlockScan block = moments ? variant.scan_with_moments[dtype] : variant.scan[dtype];
  Job job{view, layout, block, item, {}, {}};
  const auto stored = static_cast<int64_t>(layout.stored);
  if (layout.stored * item < kParallelBytes)
    job.totals = job.range(0, stored);
  else
    parallel_for(stored, kGrainBytes / item, Job::run, &job);

  const BlockTotals& t = job.totals;
  result.nan = t.nan * layout.repeat;
  result.posinf = t.posinf * layout.repeat;
  result.neginf = t.neginf * layout.repeat;
  result.zeros = t.zeros * layout.repeat;
  result.subnormals = t.subnormals * layout.repeat;
  result.sum = t.sum * static_cast<double>(layout.repeat);
  result.sumsq = t.sumsq * static_cast<double>(layout.repeat);
  if (t.has_finite)
    with_format(view.dtype, [&](auto format) {
      using Format = decltype(format);
      using Int = typename Format::Int;
      result.max_key = order_key(Format::float64_bits(static_cast<Int>(t.max_key)));
      result.min_key = ~order_key(Format::float64_bits(static_cast<Int>(t.min_key)));
    });
  return result;
}

void scan_many(const std::vector<TensorView>& views, bool moments, Row* rows) {
  struct Small {
    const std::vector<TensorView>& views;
    bool moments;
    Row* rows;
    std::vector<size_t> index;
    std::vector<int64_t> begin;  // its offset in bytes, as if all lay one after another
    int64_t bytes = 0;

    // A tensor is scanned by the thread in whose range it begins.
    static void run(int64_t begin, int64_t end, void* self) {
      const Small& small = *static_cast<Small*>(self);
      const auto first = std::lower_bound(small.begin.begin(), small.begin.end(), begin);
      for (auto i = static_cast<size_t>(first - small.begin.begin());
           i < small.index.size() && small.begin[i] < end; ++i)
        small.rows[small.index[i]] = scan(small.views[small.index[i]], small.moments);
    }
  } small{views, moments, rows, {}, {}};
  for (size_t i = 0; i < views.size(); ++i) {
    const uint64_t bytes = views[i].elements * item_size(views[i].dtype);
    if (bytes >= kParallelBytes) {
      rows[i] = scan(views[i], moments);
      continue;
    }
    small.index.push_back(i);
    small.begin.push_back(small.bytes);
    small.bytes += static_cast<int64_t>(std::max(bytes, uint64_t{1}));
  }
  if (static_cast<uint64_t>(small.bytes) < kParallelBytes)
    Small::run(0, small.bytes, &small);
  else
    parallel_for(small.bytes, kGrainBytes, Small::run, &small);
}

uint64_t first_nonfinite(const TensorView& view) {
  if (view.elements == 0) return 0;
  // A flat tensor is seen as one dimension, so that the search is one run.
  MemoryLayout layout;
  plan_layout(view, layout);
  TensorView flat = view;
  if (layout.row_major_flat) {
    flat.logical.count = 1;
    flat.logical.size[0] = static_cast<int64_t>(view.elements);
    flat.logical.stride[0] = 1;
  }
  const BlockScan scan = selected()->scan[static_cast<int>(view.dtype)];
  return with_format(view.dtype, [&](auto format) { return search<decltype(format)>(flat, scan); });
}

uint64_t nonfinite_parts(const TensorView& view) {
  constexpr int64_t kMostParts = 64;
  if (view.elements == 0) return 0;
  const int64_t size = view.user_dims() > 0 ? view.logical.size[0] : 1;
  const int64_t parts = std::min(size, kMostParts);
  uint64_t bad = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * size / parts, end = (part + 1) * size / parts;
    TensorView slice = view;
    if (view.user_dims() > 0) {
      slice.data += begin * view.logical.stride[0] * static_cast<int64_t>(item_size(view.dtype));
      slice.logical.size[0] = end - begin;
      slice.elements =
          view.elements / static_cast<uint64_t>(size) * static_cast<uint64_t>(end - begin);
    }
    const Row row = scan(slice, /*moments=*/false);
    if (row.nan || row.posinf || row.neginf) bad |= uint64_t{1} << part;
  }
  return bad;
}

std::vector<const char*> variants() {
  std::vector<const char*> names;
  for (const Variant* variant : usable_variants()) names.push_back(variant->name);
  return names;
}

const char* variant() { return selected()->name; }

bool use_variant(const char* name) {
  for (const Variant* variant : usable_variants())
    if (std::strcmp(variant->name, name) == 0) {
      selected() = variant;
      return true;
    }
  return false;
}

void plain_read(const void* data, uint64_t bytes) {
  struct Range {
    const char* data;
    BlockScan read;
    static void run(int64_t begin, int64_t end, void* self) {
      const Range& r = *static_cast<Range*>(self);
      BlockTotals t{};
      r.read(r.data + begin, static_cast<size_t>(end - begin), &t);
      static std::mutex mutex;
      static int64_t folded;  // the compiler must not drop the reads
      std::lock_guard<std::mutex> lock(mutex);
      folded |= t.max_key;
    }
  } range{static_cast<const char*>(data), selected()->read};
  if (bytes < kParallelBytes)
    Range::run(0, static_cast<int64_t>(bytes), &range);
  else
    parallel_for(static_cast<int64_t>(bytes), kGrainBytes, Range::run, &range);
}

}  // namespace nanscan::cpu
