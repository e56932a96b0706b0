/* A GPU without a driver, for PyTorch without a GPU: what autograd asks of a device before it runs operations on it.
 *
 * A trace's tensors claim to be on cuda:0 but hold no memory, and their operations compute shapes only (fake.py).
 * Autograd still wants a device guard and streams from C++, where a CPU build has none and a build for CUDA needs a
 * driver. These replace them: the last guard counts, and the preferred hooks. A stream is a number, 0 by default; each
 * thread has a current one. Only for traces, in a process of their own (gpu.py), and before PyTorch asks for hooks. */
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace {

const c10::Device GPU(c10::DeviceType::CUDA, 0);
thread_local int64_t current = 0;

c10::Stream numbered(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, GPU, number); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return numbered(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return numbered(std::exchange(current, stream.id())); }
  // Autograd's own events, where gradients of several streams meet, order nothing in a trace.
  void record(void **, const c10::Stream &, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void *, const c10::Stream &) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

extern "C" {
int fivefold_stream() { return static_cast<int>(current); }
int fivefold_exchange_stream(int number) { return static_cast<int>(std::exchange(current, number)); }
}

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}
