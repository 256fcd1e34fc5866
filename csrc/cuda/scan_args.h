// The arguments of the CUDA kernels, passed by value, and the constants that host and kernels
// share.
#pragma once

#include "../float_format.h"
#include "../row.h"

namespace nanscan::cuda {

constexpr int kThreads = 256;  // of a block
constexpr int kLoads = 4;      // loads of 16 bytes that a thread issues together
// Blocks that fit on one multiprocessor, with 48 and 80 registers for each thread.
constexpr int kFlatBlocksPerSm = 5;
constexpr int kOtherBlocksPerSm = 3;
constexpr int kLoadBytes = 16;
constexpr int kTileBytes = kThreads * kLoads * kLoadBytes;  // read by a block in one round

constexpr int kMaxOuter = 64;
constexpr int kManyTensors = 96;  // with kManyDims: fills the 4 KB that any driver accepts
constexpr int kManyDims = 40;

struct WalkDim {
  uint64_t size;
  int64_t stride;  // in elements
};

// One dimension of an IndexPlan, which maps walk order to row-major order.
struct IndexDim {
  uint64_t size;
  uint64_t weight;  // what one step adds to the row-major index
};

// One contiguous tensor in row-major order, aligned to the size of its elements.
struct FlatScan {
  const void* data;
  uint64_t count;  // elements, at least 1
  Row* row;
  uint32_t* tickets;  // the last ticket taken on this device
  uint32_t mirrored;  // the row has a mirror
};

// One tensor in any layout: a run of `run` elements, `run_stride` apart, for each index into
// `outer`. A unit of work is a piece of a run: `lanes` threads make kLoads loads each, of one
// element or, with `vectors`, of 16 bytes; a shorter rest at the end of a run counts as one load.
// With `vectors`, every run is contiguous and begins at a multiple of 16 bytes.
struct StridedScan {
  const void* data;
  uint64_t run;
  int64_t run_stride;
  uint64_t pieces;  // of a run
  uint64_t units;   // in all
  uint64_t repeat;  // logical elements for each stored one
  uint64_t elements;
  Row* row;
  uint32_t* tickets;
  uint32_t mirrored;
  uint32_t lanes;  // a power of two, at most 32
  uint32_t vectors;
  uint32_t outer_count;
  uint32_t index_count;  // 0: walk order is row-major order
  WalkDim outer[kMaxOuter];
  IndexDim index[kMaxOuter + 1];
};

struct ManyEntry {
  const void* data;
  uint64_t count;
  Row* row;
  uint32_t first_block;  // its last block is the one before the next entry's first
  DType dtype;
  uint8_t index_count;
  uint16_t index_begin;
};

// Many dense tensors, in any dimension order. Each has its own range of the grid's blocks.
struct ManyScan {
  uint32_t tensors;
  uint32_t blocks;
  uint32_t mirrored;  // every row has a mirror
  uint32_t* tickets;
  ManyEntry entry[kManyTensors];
  IndexDim index[kManyDims];
};
static_assert(sizeof(ManyScan) <= 4096 && sizeof(StridedScan) <= 4096,
              "the limit of kernel arguments in every driver");

}  // namespace nanscan::cuda
