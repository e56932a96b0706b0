/* A GPU that does nothing, for PyTorch without a GPU: what autograd asks of a device before it runs operations on it.
 *
 * A trace's tensors claim to be on cuda:0 but hold no memory, and their operations compute shapes only (fake.py).
 * Autograd still wants a device guard, streams and events from C++. A CPU build has none, and those of a build for CUDA
 * need a driver. These replace them: the last guard counts, and the preferred hooks. A stream is a number, 0 by default.
 * The current one of each thread is kept here, and a listener hears of events (streams.py).
 * Only for traces, in a process of their own (trace/gpu.py). It must be loaded before PyTorch asks for CUDA's hooks. */
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <utility>

namespace {

const c10::Device GPU(c10::DeviceType::CUDA, 0);
const c10::Stream QUEUE(c10::Stream::DEFAULT, GPU);
thread_local int64_t current = 0;
using Listener = void (*)(int64_t event, int64_t stream, bool waits);
Listener listener = nullptr;
std::atomic<intptr_t> events{0};

c10::Stream numbered(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, GPU, number); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return numbered(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return QUEUE; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return QUEUE; }
  c10::Stream getNewStream(c10::Device, int) const override { return QUEUE; }
  c10::Stream exchangeStream(c10::Stream stream) const override { return numbered(std::exchange(current, stream.id())); }
  void record(void **event, const c10::Stream &stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void *>(++events);
    if (listener) listener(reinterpret_cast<int64_t>(*event), stream.id(), false);
  }
  void block(void *event, const c10::Stream &stream) const override {
    if (listener) listener(reinterpret_cast<int64_t>(event), stream.id(), true);
  }
  bool queryEvent(void *) const override { return true; }
  bool queryStream(const c10::Stream &) const override { return true; }
  void synchronizeStream(const c10::Stream &) const override {}
  void synchronizeEvent(void *) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
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
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

}  // namespace

extern "C" {
int fivefold_stream() { return static_cast<int>(current); }
int fivefold_exchange_stream(int number) { return static_cast<int>(std::exchange(current, number)); }
void fivefold_listen(Listener heard) { listener = heard; }
}

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}
