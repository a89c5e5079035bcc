// A device "cuda:0" whose memory is the host's, for a build of PyTorch without CUDA.
//
// Tensors on it say is_cuda, autograd gives it a thread of its own, and every operation computes by
// its CPU implementation on copies. An operation that would fail on a GPU because its operands lie
// on different devices fails here too.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

// What PyTorch asks when it looks for an accelerator.
namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  // Memory that is pinned for a copy is memory of the host.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};
// Found under the name of the class.
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {

const Device device(c10::kCUDA, 0);

// New memory holds NaN in every floating-point type, so that an element nobody writes is seen.
struct PoisonedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t alignment = 64;
    void* memory = nullptr;
    if (bytes > 0) {
      memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
      TORCH_CHECK(memory != nullptr, "the fake device is out of memory");
      std::memset(memory, 0xff, bytes);
    }
    return {memory, memory, &std::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

PoisonedAllocator allocator;
const bool allocates = (c10::SetAllocator(c10::kCUDA, &allocator, /*priority=*/255), true);

// One device and one stream. Registering it is what gives the device its thread in autograd.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(Device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// The same memory as a tensor on the CPU.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return at::from_blob(storage.mutable_data(), {elements}, at::TensorOptions(tensor.scalar_type()))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// Indices may lie on the CPU, and copying is between devices.
const std::set<std::string> may_mix = {
    "aten::_copy_from", "aten::_index_put_impl_", "aten::_unsafe_index.Tensor", "aten::copy_",
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_",
};

std::string name_of(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Any operation: on copies on the CPU, after the check of devices that CUDA's would have made.
void compute_on_copies(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  bool here = false, elsewhere = false;
  const auto see = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    here |= tensor.is_cuda();
    elsewhere |= !tensor.is_cuda() && tensor.dim() > 0;  // a number may lie on the CPU
  };
  for (const auto& value : torch::jit::last(*stack, operation.schema().arguments().size())) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) see(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
        if (tensor.has_value()) see(*tensor);
      }
    }
  }
  const auto name = name_of(operation.operator_name());
  TORCH_CHECK(
      !(here && elsewhere) || may_mix.count(name) > 0,
      "Expected all tensors to be on the same device, but found cuda:0 and cpu, in ", name);
  at::native::cpu_fallback(operation, stack);
}

Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.numel() > 0) on_host(self).copy_(source.numel() > 0 ? on_host(source) : source);
  return self;
}

const Tensor& resize_(
    const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  const auto elements = self.storage_offset() + c10::multiply_integers(sizes);
  const auto bytes = static_cast<size_t>(elements) * self.itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto memory = allocator.allocate(bytes);
    if (storage.nbytes() > 0) std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(memory));
    storage.set_nbytes(bytes);
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto wanted = format.value_or(at::MemoryFormat::Contiguous);
  if (wanted != at::MemoryFormat::Contiguous && wanted != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(wanted);
  }
  return self;
}

// The two ways in which the fallback writes an in-place result back.
Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  Tensor written = to;
  return copy_(written, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (!to.sizes().equals(source.sizes())) {
    resize_(to, c10::fromIntArrayRefSlow(source.sizes()), std::nullopt);
  }
  return copy_from(source, to, false);
}

Tensor& share(
    Tensor& self, const c10::Storage& storage, c10::IntArrayRef sizes, c10::IntArrayRef strides,
    int64_t offset) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

Tensor& set_storage(
    Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides) {
  return share(
      self, storage, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset.expect_int());
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return share(self, storage, {elements}, {1}, 0);
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return share(self, other.storage(), other.sizes(), other.strides(), other.storage_offset());
}

Tensor& set_empty(Tensor& self) {
  return share(self, at::empty({0}, self.options()).storage(), {0}, {1}, 0);
}

c10::Scalar to_number(const Tensor& self) { return on_host(self).item(); }

// CPUs have no product of half precision with a result in float32.
Tensor product_in(const Tensor& self, const Tensor& other, at::ScalarType dtype) {
  return self.to(dtype).mm(other.to(dtype));
}

// Attention takes apart: 0 is the form in plain operations.
int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

const bool attends =
    (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention), true);

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_copies>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("resize_", resize_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("set_", set_empty);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_local_scalar_dense", to_number);
  library.impl("mm.dtype", product_in);
  // Views share memory, which copies cannot.
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  // These have an implementation for every device, which would look for a library of CUDA's.
  for (const char* name :
       {"convolution", "convolution_backward", "native_batch_norm", "native_layer_norm",
        "native_group_norm", "_embedding_bag"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_copies>());
  }
}
