// SPDX-License-Identifier: Apache-2.0
// Every operator of a device runs as the CPU's, on the device's own memory: only results that are new are copied.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "tests/simulated_cuda/memory.h"
#include "tests/simulated_cuda/operators.h"
#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

at::Tensor empty_strided_on(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           type);
}

c10::Device or_here(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : device_of(current_device());
}

const at::Tensor& resize_on_device(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard guard(self.device());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(),
                                                                  static_cast<size_t>(self.storage_offset()));
  const c10::Storage& storage = self.storage();
  if (bytes > storage.nbytes()) {
    c10::DataPtr grown = device_memory()->allocate(bytes);
    if (storage.nbytes() > 0)
      std::memcpy(real_address(grown.get()), real_address(storage.mutable_data()), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

// One call of an operator: its arguments become views that the CPU may read, and afterwards themselves again.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), name_(c10::toString(op.operator_name())), arguments_(op.schema().arguments().size()) {}

  void run() {
    look_at_arguments();
    const int device = device_.value_or(device_of(current_device())).index();
    const c10::Stream stream = current_stream(device);
    before_operator(name_, device);
    count(device);
    const Moment moment = put(name_, stream, touched_);
    if (waits_for_sizes()) wait_for(stream);
    for (size_t i = 0; i < arguments_; ++i) argument(i) = as_cpu(argument(i));
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (const View& view : views_) adopt_new_size(view);
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack_.size() - results; i < stack_.size(); ++i)
      stack_[i] = as_result(stack_[i], device_of(device), moment, stream);
  }

 private:
  struct View {
    at::Tensor original, seen;
  };

  c10::IValue& argument(size_t i) { return torch::jit::peek(stack_, i, arguments_); }

  // All tensors of a device must be of one device, and those of the host scalars or indices.
  void look_at_arguments() {
    for (size_t i = 0; i < arguments_; ++i) {
      const auto* const alias = op_.schema().arguments()[i].alias_info();
      is_written_ = alias != nullptr && alias->isWrite();
      const c10::IValue& value = argument(i);
      if (value.isTensor()) look_at(value.toTensor());
      if (value.isDevice() && value.toDevice().is_cuda() && !device_) wanted_ = or_here(value.toDevice());
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector()) look_at(tensor);
      else if (value.isList())
        for (const c10::IValue& element : value.toListRef())
          if (element.isTensor()) look_at(element.toTensor());
    }
    if (!device_) device_ = wanted_;
    if (device_ && host_tensor_.defined() && !takes_host_tensors()) throw_mixed(*device_, host_tensor_.device());
  }

  void look_at(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) host_tensor_ = tensor;
      return;
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, "lockstep simulator: ", name_,
                " of a sparse tensor is not simulated");
    if (device_ && *device_ != tensor.device()) throw_mixed(*device_, tensor.device());
    device_ = tensor.device();
    const int owner = device_of_address(tensor.storage().data());
    TORCH_CHECK(tensor.numel() == 0 || owner == device_->index(), "lockstep simulator: ", name_, " on ", *device_,
                " was given memory of ", owner < 0 ? std::string("the host") : "cuda:" + std::to_string(owner));
    touched_.push_back({tensor, is_written_});
  }

  [[noreturn]] void throw_mixed(c10::Device one, c10::Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
                other, "! (when checking arguments of ", name_, ", simulated)");
    std::abort();
  }

  bool takes_host_tensors() const {
    static const std::set<std::string> kIndexing{"aten::index",     "aten::index_put_",    "aten::_index_put_impl_",
                                                 "aten::index_put", "aten::_unsafe_index", "aten::index_put.out"};
    return kIndexing.contains(op_.schema().name());
  }

  // Operators that must know their result's size on the host, and so wait for the device.
  bool waits_for_sizes() const {
    static const std::set<std::string> kNames{"aten::nonzero",  "aten::masked_select",    "aten::equal",
                                              "aten::_unique2", "aten::unique_dim",       "aten::unique_consecutive",
                                              "aten::bincount", "aten::repeat_interleave"};
    if (kNames.contains(op_.schema().name())) return true;
    return takes_host_tensors() &&
           std::ranges::any_of(touched_, [](const Touch& touch) { return touch.tensor.scalar_type() == at::kBool; });
  }

  void count(int device) {
    const Lock lock(mutex());
    ++counters(device).operators;
  }

  c10::IValue as_cpu(const c10::IValue& value) {
    if (value.isTensor()) return as_cpu(value.toTensor());
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(as_cpu(tensor));
      return list;
    }
    if (!value.isList()) return value;
    c10::impl::GenericList list(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) list.push_back(as_cpu(element));
    return list;
  }

  at::Tensor as_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    at::Tensor seen = host_view(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) seen.unsafeGetTensorImpl()->set_wrapped_number(true);
    views_.push_back({tensor, seen});
    return seen;
  }

  // An operator may resize what it writes, such as an empty `out`.
  static void adopt_new_size(const View& view) {
    if (view.seen.sizes() == view.original.sizes()) return;
    resize_on_device(view.original, view.seen.sizes(), std::nullopt);
    host_view(view.original).copy_(view.seen);
  }

  c10::IValue as_result(const c10::IValue& value, c10::Device device, Moment moment, const c10::Stream& stream) {
    const auto result_of = [&](const at::Tensor& tensor) { return as_result(tensor, device, moment, stream); };
    if (value.isTensor()) return result_of(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(result_of(tensor));
    return list;
  }

  // An argument, a part of one, or something new.
  at::Tensor as_result(const at::Tensor& result, c10::Device device, Moment moment, const c10::Stream& stream) {
    if (!result.defined()) return result;
    for (const View& view : views_) {
      if (view.seen.is_same(result)) return view.original;
      if (result.numel() > 0 && view.seen.storage().data() == result.storage().data())
        return view.original.as_strided(result.sizes(), result.strides(), result.storage_offset());
    }
    const at::Tensor made = empty_strided_on(result.sizes(), result.strides(), result.scalar_type(), device);
    if (result.numel() == 0) return made;
    const size_t bytes = at::detail::computeStorageNbytes(result.sizes(), result.strides(), result.element_size());
    std::memcpy(real_address(made.data_ptr()), result.const_data_ptr(), bytes);
    note_touch(name_, moment, stream, {made, true});
    return made;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::string name_;
  size_t arguments_;
  std::optional<c10::Device> device_, wanted_;
  at::Tensor host_tensor_;
  bool is_written_ = false;
  std::vector<Touch> touched_;
  std::vector<View> views_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided_on(sizes, strides, type.value_or(at::get_default_dtype_as_scalartype()), or_here(device));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(or_here(device));
  return at::detail::empty_generic(sizes, device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   type.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  const int device = tensor.get_device();
  const c10::Stream stream = current_stream(device);
  before_copy("item()", device);
  put("item()", stream, {{tensor, false}});
  wait_for(stream);
  {
    const Lock lock(mutex());
    counters(device).device_to_host += tensor.element_size();
    ++counters(device).copies;
  }
  return at::native::_local_scalar_dense_cpu(host_view(tensor));
}

void record(at::Tensor& tensor, c10::Stream stream) { record_stream(tensor.storage().data(), stream); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_on_device));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("record_stream", TORCH_FN(record));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  // As a whole: their parts are chosen by the device, and some exist for real GPUs only.
  for (const char* const name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace simulated_cuda
