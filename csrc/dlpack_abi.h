// The part of the DLPack C ABI that nanscan uses, declared from the DLPack 1.x specification
// (dmlc/dlpack, include/dlpack/dlpack.h). From 2.10 on, torch publishes a table of these functions
// as torch.Tensor.__dlpack_c_exchange_api__, so no torch header is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanscan::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kExchangeApiName = "dlpack_exchange_api";

enum DeviceType : int32_t { kCPU = 1, kCUDA = 2 };

enum TypeCode : uint8_t {
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kFloat8E4M3FN = 10,
  kFloat8E4M3FNUZ = 11,
  kFloat8E5M2 = 12,
  kFloat8E5M2FNUZ = 13,
};

// The type codes from this one on are floating-point formats of 8 bits or fewer.
constexpr uint8_t kFirstSmallFloat = 7;

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means contiguous
  uint64_t byte_offset;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* prev_api;
};

struct ExchangeApi {
  ExchangeApiHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // Fills a view that borrows from the Python tensor. Returns -1 with a Python error set.
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

static_assert(sizeof(Tensor) == 48, "DLTensor is 48 bytes on every 64-bit platform");
static_assert(sizeof(ExchangeApiHeader) == 16 && sizeof(ExchangeApi) == 56,
              "the exchange table has a header of 16 bytes and five pointers");

}  // namespace nanscan::dlpack
