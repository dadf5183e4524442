// CUDA devices for a CPU build of torch, as far as fake tensors need them: a device guard and hooks that do nothing. Autograd asks
// both for devices and streams; fake tensors have no data, so no kernel ever runs. fake_cuda.py builds and loads this file.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex NUM_DEVICES = 8;
static thread_local DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index() < 0 ? current : device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice()); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = event; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

// Off, torch sees no accelerator, so that all other tests in the process run as on a machine without one.
static bool is_on = false;

// The registry knows the hooks by the name of the class.
struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return is_on; }
  bool isBuilt() const override { return is_on; }
  bool isAvailable() const override { return is_on; }
  bool hasPrimaryContext(DeviceIndex) const override { return is_on; }
  int getNumGPUs() const override { return is_on ? NUM_DEVICES : 0; }
  DeviceIndex deviceCount() const override { return is_on ? NUM_DEVICES : 0; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return device < 0 ? current : std::exchange(current, device); }
  bool isPinnedPtr(const void*) const override { return false; }
};
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
extern "C" void fake_cuda_switch(bool on) { is_on = on; }
