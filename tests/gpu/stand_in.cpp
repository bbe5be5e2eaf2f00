// A device that computes on the CPU in memory of its own, so that tests without a GPU find what a GPU would refuse: operators that mix
// devices, and a host that waits for a number.
//
// Operators run on copies in the CPU's memory (torch's own fallback for devices without kernels). Memory is filled with a pattern when it
// is given out. Where `forbid(true)` was called, reading a number of the device from that thread is an error.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
const c10::Device device(kind, 0);
thread_local bool forbidden = false;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : at::Allocator {
  static void give_back(void* start) { std::free(start); }
  at::DataPtr allocate(size_t size) override {
    void* start = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    if (start) std::memset(start, 0x5a, size);
    return {start, start, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, std::size_t size) const override { std::memcpy(target, source, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

struct Hooks : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<at::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, Where, Flag, Format format) {
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, Where, Flag) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  if (target.numel()) on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar number(const at::Tensor& tensor) {
  TORCH_CHECK(!forbidden, "the host waits for the device");
  return at::_local_scalar_dense(on_cpu(tensor));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, Format format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, source, offset, size, stride);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool here = false, elsewhere = false;
  auto look = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      here |= tensor.is_privateuseone();
      elsewhere |= !tensor.is_privateuseone() && tensor.dim() > 0;  // as on a GPU, a number of the CPU may go with tensors
    }
  };
  for (auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const auto& tensor : value.toTensorVector()) look(tensor);
  }
  TORCH_CHECK(!(here && elsewhere), "tensors of two devices in ", op.schema().name());
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &number);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

TORCH_LIBRARY(stand_in, m) {
  m.def("forbid(bool forbidden) -> ()", [](bool given) { forbidden = given; });
}

}  // namespace
