// RMSNorm of rows in fp32 as an operator of PyTorch, for CPUs: x / sqrt(mean(x^2) + eps) * weight.
// It uses the part of PyTorch's C++ interface that stays the same from version to version, which also compiles fast.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>

using torch::stable::Tensor;

// x (..., columns) and weight (columns,): fp32, contiguous.
Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "rmsnorm: x is not in fp32");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "rmsnorm: weight is not in fp32");
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "rmsnorm: an input is not contiguous");
  STD_TORCH_CHECK(x.dim() > 0 && x.numel() > 0, "rmsnorm: x is empty");
  const int64_t columns = x.size(x.dim() - 1), rows = x.numel() / columns;
  STD_TORCH_CHECK(weight.numel() == columns, "rmsnorm: weight has another length than a row of x");
  Tensor out = torch::stable::empty_like(x);
  const float* input = x.const_data_ptr<float>();
  const float* gain = weight.const_data_ptr<float>();
  float* output = out.mutable_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row, input += columns, output += columns) {
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += input[i] * input[i];
    const float scale = 1 / std::sqrt(sum / columns + static_cast<float>(eps));
    for (int64_t i = 0; i < columns; ++i) output[i] = input[i] * scale * gain[i];
  }
  return out;
}

STABLE_TORCH_LIBRARY(lesson, library) {
  library.def("rmsnorm(Tensor x, Tensor weight, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lesson, CPU, library) {
  library.impl("rmsnorm", TORCH_BOX(&rmsnorm));
}
