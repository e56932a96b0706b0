// The same operator for NVIDIA's GPUs. UNTRIED: it was neither compiled with nvcc nor run on a GPU.
// A block has a row. Its threads add up squares of neighbours, a warp its threads' sums by shuffles, the first warp
// those of all warps, which meet in shared memory.

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

constexpr int WARP = 32, THREADS = 256;

__device__ float sum_of_warp(float value) {
  for (int apart = WARP / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

__global__ void rmsnorm_rows(const float* x, const float* weight, float* out, int64_t columns, float eps) {
  __shared__ float sums[THREADS / WARP];
  const float* input = x + blockIdx.x * columns;
  float* output = out + blockIdx.x * columns;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < columns; i += THREADS) sum += input[i] * input[i];  // coalesced: neighbours side by side
  sum = sum_of_warp(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  sum = sum_of_warp(threadIdx.x % WARP < THREADS / WARP ? sums[threadIdx.x % WARP] : 0);  // in every warp
  const float scale = rsqrtf(sum / columns + eps);
  for (int64_t i = threadIdx.x; i < columns; i += THREADS) output[i] = input[i] * scale * weight[i];
}

Tensor rmsnorm_cuda(const Tensor& x, const Tensor& weight, double eps) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "rmsnorm: x is not in fp32");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "rmsnorm: weight is not in fp32");
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "rmsnorm: an input is not contiguous");
  STD_TORCH_CHECK(x.get_device_index() == weight.get_device_index(), "rmsnorm: inputs are on two devices");
  STD_TORCH_CHECK(x.dim() > 0 && x.numel() > 0, "rmsnorm: x is empty");
  const int64_t columns = x.size(x.dim() - 1), rows = x.numel() / columns;
  STD_TORCH_CHECK(weight.numel() == columns, "rmsnorm: weight has another length than a row of x");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor out = torch::stable::empty_like(x);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  rmsnorm_rows<<<rows, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
      x.const_data_ptr<float>(), weight.const_data_ptr<float>(), out.mutable_data_ptr<float>(), columns,
      static_cast<float>(eps));
  STD_TORCH_CHECK(cudaGetLastError() == cudaSuccess, "rmsnorm: the kernel was not launched");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lesson, CUDA, library) {
  library.impl("rmsnorm", TORCH_BOX(&rmsnorm_cuda));
}
